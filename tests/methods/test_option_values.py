# SPDX-License-Identifier: Apache-2.0
"""Values of options: of their kinds in Python too, and file names whose texts are read again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold import D2O, H2O, TOVA, Duo, KNorm, KvfoldError, KVzip, Method, SnapKV, Zap, parse
from kvfold.fitted.numbers import FileName
from kvfold.methods.base import Composition, spelled_out
from kvfold.methods.description import files_of, shortest, without_files
from kvfold.methods.method import as_text
from kvfold.methods.registry import list_methods, listed
from tests.helpers.contexts import assert_same, new_model
from tests.helpers.tokenizers import word_tokenizer

if TYPE_CHECKING:
    from fractions import Fraction

# --- kinds ---------------------------------------------------------------------------------------

WRONG: list[tuple[type[Method], str, Any, str]] = [
    (SnapKV, "pooling", "maximum", "snapkv:pooling takes max or avg"),
    (KVzip, "level", "Uniform", "kvzip:level takes pair or uniform or head"),
    (D2O, "merge", None, "d2o:merge takes softmax or average or official or none"),
    (SnapKV, "window", 16.5, "snapkv:window takes a whole number"),
    (SnapKV, "window", 16.0, "snapkv:window takes a whole number"),
    (SnapKV, "window", True, "snapkv:window takes a whole number"),
    (SnapKV, "window", np.float64(16), "snapkv:window takes a whole number"),
    (SnapKV, "window", np.bool_(True), "snapkv:window takes a whole number"),
    (H2O, "recent", True, "h2o:recent takes a number"),
    (TOVA, "per_head", "no", "tova:per_head takes true or false"),
    (TOVA, "per_head", 1, "tova:per_head takes true or false"),
    (KNorm, "skip_layers", [0, 1], "knorm:skip_layers takes whole numbers with / between them"),
    (KNorm, "skip_layers", (0, 1.0), "knorm:skip_layers takes whole numbers with / between them"),
    (KNorm, "skip_layers", (0, True), "knorm:skip_layers takes whole numbers with / between them"),
    (Zap, "file", b"a.safetensors", "zap:file takes the name of a file"),
    (SnapKV, "pooling", Path("max"), "snapkv:pooling takes max or avg"),
]


@pytest.mark.parametrize(("cls", "option", "value", "message"), WRONG)
def test_a_value_of_another_kind_is_refused_in_python_too(
    cls: Callable[..., Method], option: str, value: Any, message: str
) -> None:
    wrong = cls(**{option: value})
    for method in (wrong, Composition((kvfold.Full(), wrong))):
        with pytest.raises(KvfoldError, match=re.escape(f"{message}, not {value!r}")):
            parse(method)


@pytest.mark.parametrize("text", ["snapkv:pooling=maximum", "tova:per_head=maybe"])
def test_python_and_texts_are_refused_alike(text: str) -> None:
    name, _, option = text.partition(":")
    key, _, value = option.partition("=")
    with pytest.raises(KvfoldError) as of_text:
        parse(text)
    with pytest.raises(KvfoldError) as of_python:
        parse(dataclasses.replace(parse(name), **{key: value}))
    assert str(of_text.value) == str(of_python.value)


@pytest.mark.parametrize(
    "method",
    [
        H2O(recent=1),
        H2O(recent=np.float64(0.25)),
        KNorm(skip_layers=(0, -1)),
        SnapKV(pooling=np.str_("avg")),  # type: ignore[arg-type]
        Zap(file="plain.safetensors"),  # type: ignore[arg-type]
        SnapKV(window=np.int64(16)),  # type: ignore[arg-type]
        KNorm(skip_layers=(np.int32(1),)),  # type: ignore[arg-type]
        H2O(recent=np.int64(1)),  # type: ignore[arg-type]
    ],
)
def test_values_of_their_kinds_are_taken_and_read_again(method: Method) -> None:
    assert parse(method) is method
    assert parse(str(method)) == parse(spelled_out(method)) == method


@pytest.mark.parametrize("name", list_methods())
def test_defaults_and_presets_are_of_their_kinds(name: str) -> None:
    method = parse(name)
    assert parse(method) is method
    assert repr(parse(spelled_out(method))) == repr(method)


@dataclasses.dataclass(frozen=True)
class Unreadable(Method):
    part: Fraction | None = None


@dataclasses.dataclass(frozen=True)
class Callback(Method):
    called_with: Callable[[int], int] = abs
    sizes: tuple[float, ...] = (0.5,)
    most: int | None = None


@dataclasses.dataclass(frozen=True)
class PartlyReadable(Unreadable):
    window: int = 8


def test_a_kind_that_is_unknown_hides_no_other() -> None:
    assert parse(PartlyReadable()) == PartlyReadable()
    with pytest.raises(KvfoldError, match=r"window takes a whole number, not 8\.5"):
        parse(PartlyReadable(window=8.5))  # type: ignore[arg-type]


def test_numpy_s_numbers_are_bounded_too() -> None:
    with pytest.raises(KvfoldError, match="snapkv:window is a number from"):
        parse(SnapKV(window=np.int64(2**40)))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [Unreadable(), Callback(), Callback(most=3)])
def test_kinds_that_no_text_can_give_are_not_checked(method: Method) -> None:
    assert parse(method) is method


# --- file names ----------------------------------------------------------------------------------

NAMES = {
    "/tmp/a+b.safetensors": "/tmp/a%2Bb.safetensors",
    "/tmp/a,b.safetensors": "/tmp/a%2Cb.safetensors",
    "a,1,2": "a%2C1%2C2",
    "c++/x + y, z=1": "c%2B%2B/x %2B y%2C z=1",
    "a%2Bb": "a%252Bb",
    "%%41": "%%2541",
    "%2+": "%2%2B",
    " a\n": "%20a%0A",
    "\u3000": "%E3%80%80",
}
ORDINARY = ["/data/my scorer.safetensors", "C:\\x\\y=z.tsv", "50%.tsv", "a%b", "ü/é~(1)#[2];'.txt"]


@pytest.mark.parametrize(
    ("path", "spelled"), [*NAMES.items(), *((path, path) for path in ORDINARY)]
)
def test_marks_of_the_grammar_are_escaped_and_nothing_else(path: str, spelled: str) -> None:
    method = Zap(file=FileName(path))
    assert as_text(FileName(path)) == spelled and str(method) == f"zap:file={spelled}"
    assert parse(str(method)) == parse(spelled_out(method)) == method
    assert listed(f"h2o,{spelled_out(method)},knorm") == ["h2o", spelled_out(method), "knorm"]


@given(st.text(st.sampled_from("+,%/=: \n2BCcbé\u2028a1"), min_size=1))
def test_methods_are_read_from_their_texts_whatever_their_files_are_called(path: str) -> None:
    zap, kvzip = Zap(file=FileName(path)), KVzip(questions=FileName(path))
    for method in (zap, kvzip, Composition((zap, parse("every:interval=4")))):
        for text in (str(method), spelled_out(method), shortest(str(method))):
            assert parse(text) == method
        assert set(files_of(method).values()) <= {path}
        assert without_files(str(method)) == str(method).partition(":")[0] + (
            " + every:interval=4" if isinstance(method, Composition) else ""
        )


def test_an_escape_that_is_no_character_is_refused() -> None:
    with pytest.raises(KvfoldError, match="zap:file takes the name of a file, not 'a%ff'"):
        parse("zap:file=a%ff")
    with pytest.raises(KvfoldError, match="write option=value, and %2C for a comma in a file"):
        parse("zap:file=a,b.safetensors")


def test_a_plain_string_names_a_file_too() -> None:
    method = Zap(file="a+b")  # type: ignore[arg-type]
    assert files_of(method) == {"zap:file": "a+b"}
    assert without_files(str(method)) == "zap"


@pytest.mark.parametrize("path", ["a+b.safetensors", "plain.safetensors"])
def test_a_path_names_a_file_too(path: str) -> None:
    method = Zap(file=Path(path))  # type: ignore[arg-type]
    assert parse(method) is method
    assert parse(str(method)) == Zap(file=FileName(path))
    assert files_of(method) == {"zap:file": path} and without_files(str(method)) == "zap"


def test_a_context_is_saved_with_a_file_of_any_name(tmp_path: Path) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    heads = tmp_path / "a+b, 1,2 %2C.tsv"
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    np.savetxt(heads, np.linspace(0, 1, shape[0] * shape[1]).reshape(shape), delimiter="\t")
    method = Duo(file=FileName(heads), sinks=2, recent=6)
    context = kvfold.compress(model, tokenizer, "red house garden blue stone " * 20, method, 0.5)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert loaded.cache.method == method
    assert_same(loaded.cache, context.cache)
