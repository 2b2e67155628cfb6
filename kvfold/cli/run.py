# SPDX-License-Identifier: Apache-2.0
"""`kvfold run`: generate with any model, a method and a budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from kvfold.cli.console import console, kept_per_layer, progress, seconds, size, table
from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvfold.cache import CompressedCache
    from kvfold.compat import PreTrainedModel
    from kvfold.stats import Stats

# As in kvfold.generate, which would import torch before `--help` is shown.
Compress = Literal["at_end", "per_chunk"]


@dataclass
class Clock:
    """A streamer for `generate` that notes when each token came."""

    bar: Progress
    task: TaskID
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_seen: bool = False

    def start(self) -> None:
        """Called when the prefill begins."""
        self.started = time.perf_counter()

    def put(self, _: Tensor) -> None:
        """Called with the prompt first, then with each token."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.bar.update(self.task, description="generating", completed=len(self.times))

    def end(self) -> None:
        """Called when generation ends."""

    @property
    def first_token(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.started

    @property
    def per_token(self) -> float | None:
        """Mean seconds between tokens, or None where only one came."""
        steps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / steps if steps > 0 else None


def command(
    model: Annotated[str, typer.Argument(help='A folder, a hub id, or "bundled".')],
    method: Annotated[
        str, typer.Option(help='A name of `kvfold methods`, or "snapkv:window=16".')
    ] = "snapkv",
    budget: Annotated[
        str | None,
        typer.Option(help='What to keep: "512" tokens, "0.2" or "20%" of them, "2GiB".'),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Read the prompt in pieces of this many tokens.")
    ] = None,
    compress: Annotated[
        Compress,
        typer.Option(help="When: at the prompt's end, or per_chunk, which bounds the memory."),
    ] = "at_end",
    chat: Annotated[
        bool | None,
        typer.Option(help="Put the prompt into the chat template.", show_default="if there is one"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes the choice of random methods.")] = 0,
) -> None:
    """Generate with a compressed cache, and say what it kept and cost."""
    text = _text(prompt, file)
    out = console()
    with out.status("importing torch and transformers"):
        import kvfold
    # Refused here, before a large model is loaded.
    chosen = kvfold.parse(method)
    limit = None if budget is None else kvfold.Budget.of(budget)
    # transformers shows its own progress.
    network, tokenizer = load(model, among_ranks=True)
    ids = encode(tokenizer, text, chat).to(network.device)
    cache = kvfold.CompressedCache(network, chosen, limit, tokenizer=tokenizer, seed=seed)
    with progress(out) as bar:
        clock = Clock(bar, bar.add_task(f"reading {ids.shape[1]:,} tokens", total=max_new_tokens))
        answer = _generate(
            network, tokenizer, ids, cache, clock, max_new_tokens, prefill_chunk, compress
        )
    out.print(Text(answer))
    out.print(costs(cache.stats(), clock))


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: CompressedCache,
    clock: Clock,
    max_new_tokens: int,
    prefill_chunk: int | None,
    compress: Compress,
) -> str:
    """The greedy answer, with `clock` running."""
    import kvfold

    clock.start()
    produced = kvfold.generate(
        model,
        ids,
        cache=cache,
        attention_mask=ids.new_ones(ids.shape),
        prefill_chunk=prefill_chunk,
        compress=compress,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
    )
    return str(tokenizer.decode(produced[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def load(
    name: str, *, among_ranks: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer; raises KvfoldError where there is none by that name.

    With `among_ranks`, processes that torchrun started share the model; else each has all of it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvfold
    from kvfold.compat import parallel_options

    shared = parallel_options() if among_ranks else {}
    try:
        if name == "bundled":
            return kvfold.bundled_model(**shared)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", attn_implementation="sdpa", **shared
        )
    except (OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise KvfoldError(f"cannot load {name!r}: {first_line}") from problem
    if shared:
        return model.eval(), tokenizer
    # transformers' wrapper hides the signature of `to` from type checkers.
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return model.eval(), tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Tensor:
    """The prompt's tokens `[1, N]`, inside the chat template if asked or, by default, if any."""
    from kvfold.context import Frame

    if chat and not tokenizer.chat_template:
        raise KvfoldError("this tokenizer has no chat template: use --no-chat")
    wrapped = bool(tokenizer.chat_template) if chat is None else chat
    if wrapped:
        frame = Frame.of(tokenizer)
        text = frame.before + text + frame.after
    # A chat template writes its own special tokens.
    return tokenizer(text, add_special_tokens=not wrapped, return_tensors="pt").input_ids


def costs(stats: Stats, clock: Clock) -> Table:
    """What was kept, what it takes, how long it took."""
    shown = table(f"{stats.method}, budget {stats.budget}", "what", "measured", right=["measured"])
    rows: list[tuple[str, Any]] = [("tokens seen", f"{stats.seen:,}")]
    rows += [(f"kept in {name}", count) for name, count in kept_per_layer(stats.kept)]
    rows += [
        ("kept of all entries", f"{stats.kept_fraction:.1%}"),
        ("bytes", size(stats.nbytes)),
        ("bytes of a full cache", size(stats.nbytes_full)),
        ("ratio of bytes", f"{stats.ratio:.1%}"),
        ("prefill and first token", seconds(clock.first_token)),
        ("per generated token", "-" if clock.per_token is None else seconds(clock.per_token)),
    ]
    for name, value in rows:
        shown.add_row(name, value)
    shown.caption = "counted after the last token"
    if stats.forced_over_budget:
        shown.caption += "; the budget came out below the forced set, which was kept"
    return shown


def _text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise KvfoldError("give the prompt as --prompt TEXT or as --file PATH")
    if prompt is not None:
        text = prompt
    else:
        assert file is not None
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise KvfoldError(f"cannot read {file}: {problem}") from problem
    if not text.strip():
        raise KvfoldError("the prompt is empty")
    return text
