# SPDX-License-Identifier: Apache-2.0
"""Options shared by several commands."""

from __future__ import annotations

import codecs
import functools
import inspect
import json
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvfold.errors import KvfoldError
from kvfold.loading import BUNDLED, Loading

if TYPE_CHECKING:
    from kvfold.budget import Budget
    from kvfold.methods.base import Method

# Python's words for what JSON spells otherwise.
PYTHON = {"True": "true", "False": "false", "None": "null"}

ModelName = Annotated[str, typer.Argument(help='A folder, a hub id, or "bundled".')]
# Of commands that have a usual model: MODEL comes first, or is named.
ModelPlace = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help='A folder, a hub id, or "bundled".', show_default="bundled"
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The model, in MODEL's place.")]
MethodText = Annotated[str, typer.Option(help='A name of `kvfold methods`, or "snapkv:window=16".')]
BUDGET_HELP = 'Entries to keep: "512" tokens, "0.2" or "20%" of them, "2GiB".'
BudgetText = Annotated[str | None, typer.Option(help=BUDGET_HELP)]
CodecText = Annotated[
    str | None,
    typer.Option(help='Codec of context files: zstd, kivi4, or "kvtc:file=BASIS,ratio=16".'),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Encoding = Annotated[str, typer.Option(help="Encoding of text files.")]
SpecialTokens = Annotated[
    bool,
    typer.Option(
        "--special-tokens", help="Parse special tokens spelled in texts; else they stay text."
    ),
]
AllowLonger = Annotated[
    bool, typer.Option("--allow-longer", help="Read texts beyond the model's trained length.")
]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        help="Argument of the chat template: enable_thinking=false, or JSON; may be repeated.",
    ),
]
QuestionAware = Annotated[
    bool,
    typer.Option(
        "--question-aware", help="Compress with the question in view, not before it is known."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what another request made.")]
TextOption = Annotated[str | None, typer.Option("--prompt", help="The text.")]
TextFile = Annotated[Path | None, typer.Option("--file", help="A text file; - is standard input.")]
PrefillChunk = Annotated[int | None, typer.Option(min=1, help="Tokens of the text per forward.")]
SystemText = Annotated[str | None, typer.Option(help="A system message before the text.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
# Same as kvfold.generate's `Compress` and the rules of the method `level`; importing these would
# import torch before `--help`.
Compress = Annotated[
    Literal["at_end", "per_chunk"],
    typer.Option(help="Compress at the text's end, or per_chunk, which bounds memory."),
]
LevelRule = Literal["mass", "votes", "union"]


def _of(panel: str) -> Any:
    """`typer.Option` in a panel of the help."""
    return functools.partial(typer.Option, rich_help_panel=panel)


out_option = functools.partial(typer.Option, "--out", "-o")
_of_model, _of_sampling = _of("How the model is loaded"), _of("How tokens are chosen")
_DTYPES = "Of the weights; auto: as in the checkpoint."
_TRUST = "Run model code that comes with the checkpoint."


def loading(
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], _of_model(help=_DTYPES)
    ] = "auto",
    device: Annotated[
        str | None, _of_model(help='"cpu", "cuda:1".', show_default="a GPU if any")
    ] = None,
    device_map: Annotated[
        str | None, _of_model(help='"auto": over all devices; needs accelerate.')
    ] = None,
    attn_implementation: Annotated[
        str | None, _of_model(help='"sdpa", "eager".', show_default="the model's own")
    ] = None,
    revision: Annotated[str | None, _of_model(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[bool, _of_model("--trust-remote-code", help=_TRUST)] = False,
    gguf_file: Annotated[
        str | None, _of_model(help="A GGUF file in the folder or repository.")
    ] = None,
    adapter: Annotated[str | None, _of_model(help="A PEFT adapter: folder or hub id.")] = None,
) -> Loading:
    """Loading options of a command's model."""
    return Loading(
        dtype=dtype,
        device=device,
        device_map=device_map,
        attn_implementation=attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
        gguf_file=gguf_file,
        adapter=adapter,
    )


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of a command's answer; greedy at temperature 0."""

    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int

    def options(self) -> dict[str, Any]:
        """Options of `model.generate`; seeds torch's global generator if tokens are sampled."""
        if self.temperature == 0:
            return {"do_sample": False}
        import torch

        torch.manual_seed(self.seed)
        cut = {"top_p": self.top_p, "top_k": self.top_k}
        chosen = {name: value for name, value in cut.items() if value is not None}
        return {"do_sample": True, "temperature": self.temperature, **chosen}


def sampling(
    temperature: Annotated[
        float, _of_sampling(min=0, max=100, help="0: greedy; above: sampling.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        _of_sampling(
            min=0, max=1, help="Sample among the likeliest of this total probability.",
            show_default="the model's",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        _of_sampling(
            min=0, help="Sample among this many of the likeliest tokens; 0: all.",
            show_default="the model's",
        ),
    ] = None,
    seed: Annotated[
        int, _of_sampling(help="Seed of sampling and random methods.", callback=checked_seed)
    ] = 0,
) -> SamplingOptions:  # fmt: skip
    """Sampling options of a command's answer; raises KvfoldError for those without effect."""
    if 0 < temperature < 0.01:
        raise KvfoldError("a temperature is 0, for the likeliest token, or at least 0.01")
    if temperature == 0 and (top_p is not None or top_k is not None):
        raise KvfoldError("temperature 0 decodes greedily: give --temperature with top-p or top-k")
    return SamplingOptions(temperature, top_p, top_k, seed)


def checked_seed(seed: int) -> int:
    """The seed; raises KvfoldError for one that torch does not take."""
    if abs(seed) >= 2**63:
        raise KvfoldError(f"--seed {seed} is beyond 64 bits: choose a smaller one")
    return seed


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Decorator that adds the options of each group to a command.

    The command gets the group's return value as the parameter of the group's name.
    """

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        added = {name: _parameters(group) for name, group in groups.items()}
        own = [each for each in _parameters(command) if each.name not in groups]
        every = [*own, *(each for parameters in added.values() for each in parameters)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{each.name: given.pop(each.name) for each in added[name]})
            command(**given)

        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in every}
        return run

    return extended


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def refuse_given(ctx: typer.Context, names: Collection[str], why: str) -> None:
    """Raises KvfoldError, with the reason `why`, if options of these parameters were given."""
    idle = [option for name, option in given_options(ctx).items() if name in names]
    if idle:
        raise KvfoldError(f"{why}: leave out {', '.join(idle)}")


def given_options(ctx: typer.Context) -> dict[str, str]:
    """Options that the user gave, even with their default value, by the names of parameters."""
    found = {}
    for option in ctx.command.params:
        source = ctx.get_parameter_source(str(option.name))
        if source is not None and source.name != "DEFAULT":
            found[str(option.name)] = option.opts[0]
    return found


def model_of(place: str | None, named: str | None) -> str:
    """The model of a command that has a usual one; raises KvfoldError for one named twice."""
    if place is not None and named is not None:
        raise KvfoldError(f"the model is named twice, {place} and --model {named}: leave one out")
    return place or named or BUNDLED


def template_arguments(given: Iterable[str] | None) -> dict[str, Any] | None:
    """Arguments of the chat template, each `name=value` or a JSON object; None: none given.

    A value is JSON, or a text. Raises KvfoldError for anything else.
    """
    if not given:
        return None
    made: dict[str, Any] = {}
    for each in given:
        if each.lstrip().startswith("{"):
            try:
                made |= json.loads(each)
            except ValueError as problem:
                raise KvfoldError(f"--template {each!r} is no JSON: {problem}") from None
            continue
        name, equals, value = each.partition("=")
        if not (name.strip() and equals):
            raise KvfoldError(f"--template takes name=value or a JSON object, not {each!r}")
        try:
            made[name.strip()] = json.loads(PYTHON.get(value, value))
        except ValueError:
            made[name.strip()] = value
    return made


def read_with(method: Method, documents: Iterable[Path]) -> list[Path]:
    """The documents, and the files that the method's options name."""
    from kvfold.methods.description import files_of

    return [*documents, *map(Path, files_of(method).values())]


def read_text(path: Path, encoding: str | None = None) -> str:
    """The text of a file, or of standard input for "-"; a byte order mark is no part of it.

    `encoding` is the command's option; None: it has none, and texts are UTF-8.

    Raises KvfoldError if it cannot be read or decoded, or is empty.
    """
    name = "standard input" if str(path) == "-" else str(path)
    remedy = "save it as UTF-8" if encoding is None else "give the right --encoding"
    encoding = encoding or "utf-8"
    try:
        if str(path) == "-":
            text = TextIOWrapper(typer.get_binary_stream("stdin"), _unmarked(encoding)).read()
        else:
            _check_document(path)
            text = path.read_text(_unmarked(encoding))
    except FileNotFoundError as problem:
        raise KvfoldError(f"cannot read {name}: there is no such file") from problem
    except LookupError as problem:
        raise KvfoldError(f"unknown encoding {encoding!r}: write for example latin-1") from problem
    except UnicodeDecodeError as problem:
        raise KvfoldError(
            f"cannot read {name} as {encoding}: {problem.reason} at byte {problem.start}; {remedy}"
        ) from problem
    except UnicodeError as problem:
        raise KvfoldError(f"cannot read {name} as {encoding}: {problem}; {remedy}") from problem
    except OSError as problem:
        raise KvfoldError(f"cannot read {name}: {problem.strerror or problem}") from problem
    if not text.strip():
        raise KvfoldError(f"{name} is empty")
    return text


def text_of(prompt: str | None, file: Path | None, encoding: str) -> str | None:
    """The text of `--prompt` or `--file`; None for none. KvfoldError for both, and an empty one."""
    if prompt is not None and file is not None:
        raise KvfoldError("give the text as --prompt TEXT or as --file PATH, not both")
    if prompt is not None and not prompt.strip():
        raise KvfoldError("the prompt is empty")
    return prompt if file is None else read_text(file, encoding)


def _check_document(path: Path) -> None:
    """Raises OSError for a device other than a terminal; a pipe is read until its writer ends."""
    mode = path.stat().st_mode
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        with path.open("rb", buffering=0) as file:
            if not file.isatty():
                raise OSError("it is a device")


def _unmarked(encoding: str) -> str:
    """The encoding, for UTF-8 the one that skips a byte order mark; LookupError if unknown."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def checked(
    method: str, budget: str | None, every: int | None = None, max_cache_tokens: int | None = None
) -> tuple[Method, Budget | None]:
    """A parsed method and budget; the other options are those of `CompressedCache`.

    Raises KvfoldError for those that a cache would refuse: commands call it before they load a
    large model.
    """
    from kvfold.cache.bound import bounded
    from kvfold.cache.plan import checked_budget
    from kvfold.methods.base import parse

    made, limit = bounded(parse(method), budget, every, max_cache_tokens)
    return made, checked_budget(made, limit, made.stages().forced.least)
