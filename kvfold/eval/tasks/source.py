# SPDX-License-Identifier: Apache-2.0
"""Readers of benchmark data: JSONL files, folders of them, hub datasets, haystack texts."""

from __future__ import annotations

import itertools
import json
import tomllib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import base
from kvfold.eval.tasks.base import (
    NoData,
    SampleRequest,
    Samples,
    Task,
    TaskSample,
    UnreadableSample,
)


class DatasetRow(BaseModel):
    """Base of row schemas: strict types as the benchmark publishes them, extra fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


AnyRow = TypeVar("AnyRow", bound=DatasetRow)

# Errors of a conversion whose row has other types than the published ones, or literals nested too
# deeply for Python's parser.
_ODD = (TypeError, AttributeError, LookupError, ArithmeticError, MemoryError, RecursionError)
_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "text or integer": (str, int),
    "text, number or truth value": (str, int, float, bool),
}
LONGEST = 1000  # characters of a sentence without its white space, in the mean


def samples(
    request: SampleRequest,
    schema: type[AnyRow],
    convert: Callable[[AnyRow], TaskSample],
    *,
    file: str,
    hub: str | None = None,
    subset: str | None = None,
    wanted: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> Samples:
    """The first `samples` rows as numbered samples; an unreadable row becomes `UnreadableSample`.

    Reads `request.data`: a JSONL file, `file`.jsonl in a folder, or the `subset` of a hub dataset.
    `wanted` filters rows of a shared file. Raises NoData, which names `hub`, if there is no data,
    and KvfoldError if the hub dataset cannot be read.
    """
    found = (one for one in _rows(request.data, file, hub, subset) if _picked(one, wanted))
    for index, (where, row) in enumerate(itertools.islice(found, request.samples)):
        if isinstance(row, str):
            yield UnreadableSample(where, row)
            continue
        try:
            yield replace(convert(schema.model_validate(row)), index=index)
        except ValidationError as error:
            yield UnreadableSample(where, first_problem(error))
        except (ValueError, SyntaxError) as error:
            yield UnreadableSample(where, str(error))
        except _ODD as error:
            yield UnreadableSample(where, f"its values cannot be read: {error!r:.200}")


def rows_of(
    schema: type[AnyRow],
    convert: Callable[[AnyRow], TaskSample],
    file: str,
    hub: str | None = None,
    subset: str | None = None,
) -> base.Draw:
    """A task's samples of rows, as `samples` reads them for a request."""
    return lambda request: samples(request, schema, convert, file=file, hub=hub, subset=subset)


def labels(answer: Any, kind: str, field: str = "answer") -> list[Any]:
    """The values of a label: those of a list, or the single one.

    Raises ValueError, which names `field`, if there is none, or one is not of the JSON type `kind`.
    """
    values = answer if isinstance(answer, list) else [answer]
    if not values:
        raise ValueError(f"field {field!r}: it is empty")
    for value in values:
        # By class, as a truth value is also an int.
        if type(value) not in _KINDS[kind]:
            raise ValueError(f"field {field!r}: {value!r:.40} is no {kind}")
    return values


def has(request: SampleRequest, file: str) -> bool:
    """True if `request.data` has samples for a task that can also be generated.

    A folder without `file`.jsonl is taken as data for other tasks.
    """
    if request.data is None:
        return False
    path = Path(request.data)
    return not path.is_dir() or (path / f"{file}.jsonl").is_file()


def at_lengths(task: Task, request: SampleRequest) -> bool:
    """True if samples of the task differ by length: not where rows of `data` are read."""
    return task.has_lengths and not (task.rows and has(request, task.rows))


def name_of(source: str | Path) -> str:
    """Name of a data source: of the file or folder without its path, or of the hub dataset."""
    path = Path(source)
    return path.resolve().name if path.exists() else str(source)


def _picked(one: tuple[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> bool:
    return not isinstance(one[1], dict) or wanted(one[1])


def first_problem(error: ValidationError) -> str:
    """The first field that is not as it should be, and why."""
    found = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    return f"field {place!r}: {found['msg']}"


def _rows(
    data: str | None, file: str, hub: str | None, subset: str | None
) -> Iterator[tuple[str, Any]]:
    """(location, row) pairs; the row is a dictionary, or a text that says why it is unreadable."""
    if data is None:
        offer = f" or the hub dataset {hub}" if hub else ""
        said = f"{file} needs data: a JSONL file, a folder with {file}.jsonl{offer}"
        raise NoData(said, f"{file}.jsonl", hub)
    path = Path(data)
    if path.is_dir():
        path = path / f"{file}.jsonl"
    if path.is_file():
        return lines(path)
    if data.count("/") != 1 or path.suffix in (".json", ".jsonl") or data.startswith((".", "/")):
        raise NoData(f"there is no file {path}", f"{file}.jsonl", hub, path)
    return _dataset(data, subset)


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(location, row) pairs of a JSONL file; blank lines are skipped."""
    with path.open("rb") as file:
        for number, bytes_of_line in enumerate(file, 1):
            line = bytes_of_line.removeprefix(BOM_UTF8)  # with which some editors begin a file
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield where, f"no UTF-8: {error}"
                continue
            except (ValueError, RecursionError) as error:  # such as a number of 5000 digits
                yield where, f"no JSON: {error}"
                continue
            yield where, row if isinstance(row, dict) else f"no object but {type(row).__name__}"


def _dataset(name: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    """(location, row) pairs of a hub dataset; raises KvfoldError if it cannot be loaded."""
    try:
        import datasets
    except ImportError as missing:
        raise KvfoldError(
            f"{name} is no file; to read it from the hub: pip install datasets"
        ) from missing
    try:
        try:
            splits = datasets.load_dataset(name, subset)
        except ValueError:
            # Some datasets publish subsets as splits.
            splits = datasets.load_dataset(name)
    except Exception as error:
        raise KvfoldError(f"the hub dataset {name} ({subset}) cannot be read: {error}") from error
    split = next((s for s in (subset, "test") if s in splits), next(iter(splits)))
    for number, row in enumerate(splits[split]):
        yield f"{name}/{split}[{number}]", dict(row)


def haystack(request: SampleRequest) -> Path | None:
    """Path of the haystack: `request.haystack`, else haystack or haystack.txt in its `data`."""
    if request.haystack is not None or request.data is None:
        return request.haystack
    found = (Path(request.data) / name for name in ("haystack", "haystack.txt"))
    return next((path for path in found if path.exists()), None)


def text(path: Path) -> str:
    """Content of a text file, or of all *.txt of a folder in order of name.

    Raises KvfoldError if there is none, or it is empty or not UTF-8.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    # A folder, a pipe or a link to nothing may be named as a text is.
    odd = [file for file in files if not file.is_file()]
    if odd or not files:
        raise KvfoldError(f"there is no text at {odd[0] if odd else path}")
    try:
        found = "\n".join(file.read_text(encoding="utf-8-sig") for file in files)
    except UnicodeDecodeError as error:
        raise KvfoldError(f"the text at {path} is not UTF-8: {error}") from error
    if not found.strip():
        raise KvfoldError(f"the text at {path} is empty")
    return found


def refuse_without_sentences(path: Path, sentences: list[str], ends: str) -> None:
    """Raises KvfoldError for a text without them, and says how sentences end.

    Needles are hidden between sentences: all would stand at its beginning, whatever their depths.
    """
    mean = sum(len("".join(one.split())) for one in sentences) / len(sentences)
    if mean > LONGEST:
        raise KvfoldError(
            f"{path} has {mean:,.0f} characters to a sentence: needles are hidden between "
            f"sentences, so give a text whose sentences end in {ends}"
        )


class TaskPrompt(NamedTuple):
    """A task's prompt with `{context}` in it, the most tokens of an answer, and the skill tested.

    Other names in braces are replaced by a row's fields. `summary` is one line about the task,
    `answer_prefix` the answer's first words.
    """

    prompt: str
    max_new_tokens: int
    group: str
    summary: str = ""
    answer_prefix: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """Texts before and after the context."""
        before, after = self.prompt.split("{context}")
        return before, after


def prompts_of(benchmark: str) -> dict[str, TaskPrompt]:
    """The prompts of a benchmark's tasks, by their names."""
    text = files("kvfold.eval.tasks").joinpath(f"{benchmark}.toml").read_text(encoding="utf-8")
    return {task: TaskPrompt(**about) for task, about in tomllib.loads(text).items()}
