# SPDX-License-Identifier: Apache-2.0
"""Headers of context files: a document, its layers, its codec and its session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvfold.codecs.basis import Scope
from kvfold.codecs.compression import Compressor
from kvfold.hf.chat_template import PromptFrame
from kvfold.hf.header import HeaderPart, ModelHeader, RopeHeader
from kvfold.methods.stages.select.one_set import Rule

MOST = 2**40  # of a number that counts something
Strict = Annotated[int, Field(strict=True)]
Whole = Annotated[Strict, Field(ge=-MOST, le=MOST)]
Count = Annotated[Strict, Field(ge=0, le=MOST)]


class LayerHeader(HeaderPart):
    """Numbers of a compressed layer (see `cache/state.py`), and names of its tensors.

    `kept` are the entries per KV head, `by_head` tensors per head, `whole` tensors of all heads,
    `turns` its evictions so far, `turn_end` and `next_round` set by decode="every" only;
    `settled` are the tokens seen when it was last brought to its budget, None: all.
    """

    index: Count
    store: Literal["dense", "segments"]
    kept: list[Count]
    dead: Count
    new: Count
    first_new: Count
    seen: Count
    turns: Count
    evicted_at: Count
    surplus: Whole | None
    over_budget: bool
    by_head: list[str]
    whole: list[str]
    turn_end: Whole | None = None
    next_round: Whole | None = None
    settled: Count | None = None


class StockLayerHeader(HeaderPart):
    """A layer of transformers' own: class `kind`, numbers, and names of its tensors."""

    index: Count
    kind: str
    numbers: dict[str, Any]
    by_head: list[str]
    whole: list[str]


class BudgetHeader(HeaderPart):
    """A `Budget`."""

    kind: Literal["tokens", "ratio", "bytes"]
    amount: int | float


class LevelHeader(HeaderPart):
    """One set of tokens in place of the heads' own, made by `rule`.

    `own`: entries that a head kept on average by itself; `tokens`: of the one set. `kl`: mean KL in
    nats of next tokens, from the heads' own sets to the one set, over `measured` tokens.
    """

    rule: Rule
    own: float
    tokens: Count
    kl: float
    measured: Count


class TextHeader(HeaderPart):
    """The prefix key of a text in a server: its bytes, and their BLAKE2b digest, hexadecimal."""

    length: Count
    digest: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]


Step = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StreamHeader(HeaderPart):
    """A compressed tensor."""

    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    ]  # fmt: skip
    shape: Annotated[list[Count], Field(max_length=8)]


class EntriesHeader(HeaderPart):
    """Keys and values in `steps` of a basis, whose digest is `basis`; see `codecs/kvtc.py`."""

    basis: str
    scope: Scope
    steps: tuple[Step, Step]


class CodecHeader(HeaderPart):
    """Parameters of the coded tensors, by `codec`; `entries` is None for one that loses nothing."""

    codec: str
    compressor: Compressor
    streams: dict[str, StreamHeader]
    entries: EntriesHeader | None


class SessionItem(HeaderPart):
    """A message of a session; see `contexts/session.py`."""

    id: str
    role: Literal["user", "tool", "assistant"]
    start: Strict
    stop: Strict


class SessionHeader(HeaderPart):
    """Messages, queued drops and counts of a session."""

    items: list[SessionItem]
    queued: tuple[str, ...]
    numbered: Count
    turns: Count
    compactions: Count

    def contradiction(self, seen: int) -> str | None:
        """The first thing that no session of `seen` tokens has; None if there is none."""
        ids = [each.id for each in self.items]
        places = [0, *(place for each in self.items for place in (each.start, each.stop)), seen]
        if places != sorted(places):
            return f"its messages do not follow each other within its {seen} tokens"
        if len(set(ids)) < len(ids):
            return "two of its messages have the same id"
        unknown = sorted(set(self.queued) - set(ids))
        return f"it drops a message {unknown[0]!r} that it does not have" if unknown else None


class Header(HeaderPart):
    """Header of a context file.

    Args:
        written_by: version of kvfold.
        method: with every option spelled out.
        budget: None for a method without one.
        protect: token ranges `(start, stop)` that are always kept.
        seed: of methods that choose at random.
        per_chunk: tokens after which the document was compressed; None: at its end.
        seen: N, tokens of the document.
        dtype: of the model, such as "bfloat16".
        bits: of quantized keys and values; None if they are not quantized.
        before, after, between: chat template parts around a document and questions.
        same_as: names of tensors that are stored once, under another name.
        checksums: of each stored tensor's dtype, shape and bytes.
        origins: modules of registered methods that are not kvfold's own, by method.
        session: None for a context that is no session.
        codec: None for tensors as they are.
        level: None where heads keep what the method gives them.
        fits: checksums of what was fitted for the method, as `fitted/fits.py` names them.
        text: of the server that wrote it; None: it is found by its tokens only.
        answered, system, arguments: of the chat template, as in `PromptFrame`.
    """

    written_by: str
    method: str
    budget: BudgetHeader | None
    protect: list[tuple[Whole, Whole]]
    seed: Strict
    per_chunk: Count | None
    seen: Count
    dtype: str
    bits: tuple[Count, Count] | None
    before: str
    after: str
    between: str | None
    model: ModelHeader
    rope: RopeHeader
    has_prefix: bool
    layers: list[LayerHeader]
    others: list[StockLayerHeader]
    same_as: dict[str, str]
    checksums: dict[str, str]
    origins: dict[str, str] = Field(default_factory=dict)
    session: SessionHeader | None = None
    codec: CodecHeader | None = None
    level: LevelHeader | None = None
    fits: dict[str, str] = Field(default_factory=dict)
    text: TextHeader | None = None
    answered: str | None = None
    system: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def frame(self) -> PromptFrame:
        """The chat template around the document and questions."""
        return PromptFrame(
            self.before,
            self.after,
            self.between,
            answered=self.answered,
            system=self.system,
            arguments=self.arguments,
        )
