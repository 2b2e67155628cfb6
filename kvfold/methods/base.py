# SPDX-License-Identifier: Apache-2.0
"""`Method` and `Stages`: a method is a frozen dataclass that names its stages.

Texts such as "a:x=1 + b" are parsed here, and methods written as texts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar
from warnings import warn

from torch import Tensor

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.observation import Observation
from kvfold.methods.option_values import as_text, check_options, from_text
from kvfold.methods.registry import plus_of, preset, registered, with_known_names
from kvfold.methods.registry import register as register
from kvfold.methods.stages.allocate.parts import PartsSource
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.merge.base import MergeStages
from kvfold.methods.stages.refit.base import Refit, check_refit
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.stages.select.one_set import Level
from kvfold.methods.stages.when import (
    AtEnd,
    Hold,
    Positions,
    Rounds,
    When,
    check_when,
    of_old_options,
    replaced_rounds,
)
from kvfold.observers.base import Needs
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.store.encoding import Encode

# Observation → scores [B, H, T], higher = keep
Score = Callable[[Observation], Tensor]
# Observation of a layer with every token → slots [B, K] of the tokens that the next layer computes
TokenPruning = Callable[[Observation], Tensor]
# (Observation, scores [B, H, T], forced [B, H, T], positions [B, H, T] with −1 for padding, entries
# to keep [B, H], forced ones included) → slots [B, H, K] ascending, −1 for holes
Select = Callable[[Observation, Tensor, Tensor, Tensor, Tensor], Tensor]
# (total entries over all layers, tokens seen, layers) → entries per layer
Schedule = Callable[[int, int, int], list[int]]
# (scores [B, H, T] with −inf for entries that are no candidates, mean entries per head [B]) →
# entries per head [B, H]
Heads = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """Allocation without a budget: each layer's size follows from its own observation.

    `size`: Observation → entries per head `[B]`, or `[B, H]` with `per_head`, forced ones included.
    `error`: (Observation, kept entries bool `[B, H, T]`) → relative error `[B, 1 or 2]` of the
    layer's output, predicted and measured; None: not reported. `in_rounds`: sizes follow from each
    round's observation.
    """

    size: Callable[[Observation], Tensor]
    error: Callable[[Observation, Tensor], Tensor] | None = None
    per_head: bool = False
    in_rounds: bool = False


@dataclass(frozen=True)
class Across:
    """Allocation across layers: sizes that depend on a statistic of every layer.

    `statistic`: Observation → tensor of any shape that `share` understands. `share`: (statistics of
    all layers, budget per head and layer `[B]`, tokens seen `[B]`) → entries per head of each
    layer, `[B]`, or `[B, H]` with `per_head`. The budget is int64; with `unrounded` it is float64,
    before rounding down. A layer of size `UNLIMITED` (methods/stages/allocate/rounding.py) is never
    compressed. `in_rounds`: in rounds sizes per head hold for the answer too; heads of size
    `UNLIMITED` grow. `parts`: a file; a cache gives `share` its content, as `parts=`.
    """

    statistic: Callable[[Observation], Tensor]
    share: Callable[..., list[Tensor]]
    per_head: bool = False
    unrounded: bool = False
    in_rounds: bool = False
    parts: PartsSource | None = None


@dataclass(frozen=True)
class Stages:
    """The stages of a method; a stage at None or at its default does nothing.

    `when` entries leave: see `methods/stages/when.py`. `positions` "reindex" rotates sinks up to
    the recent tokens (StreamingLLM); "consecutive" rotates, at each eviction, all kept keys of a
    head up to the positions before the next token. Raises IllegalComposition for stages that
    exclude one another.
    """

    needs: Needs = field(default_factory=Needs)  # data to observe during forwards
    score: Score | None = None  # None: every entry is kept
    # layers' sizes; None with a score: uniform
    allocate: Schedule | Measured | Across | None = None
    heads: Heads | None = None  # a layer's size shared among its heads
    select: Select | None = None  # slots to keep; None: those of the highest scores
    level: Level | None = None  # all layers and heads keep one set of tokens, made by this rule
    forced: Forced = field(default_factory=Forced)  # entries that stay whatever their score
    merge: MergeStages | None = None  # changes kept entries by evicted ones
    refit: Refit | None = None  # fits kept values and biases to reference queries
    encode: Encode | None = None  # how the oldest entries are stored
    when: When = field(default_factory=AtEnd)  # at which entries leave
    positions: Positions = "original"
    token_pruning: TokenPruning | None = None  # runs between the layers of a forward
    inexact: str = ""  # reason why kept entries differ from the budget, "" if they do not
    method: str = ""  # the method's text, filled in by the cache
    # What `when` replaces, until 0.2
    decode: InitVar[str | None] = None
    every: InitVar[int | None] = None
    prompt: InitVar[str | None] = None
    sizes: InitVar[str | None] = None
    phase: InitVar[str | None] = None
    agree: InitVar[bool] = False

    def __post_init__(
        self,
        decode: str | None,
        every: int | None,
        prompt: str | None,
        sizes: str | None,
        phase: str | None,
        agree: bool,
    ) -> None:
        old = {"decode": decode, "every": every, "prompt": prompt, "sizes": sizes, "phase": phase}
        when = of_old_options(old)
        if when is not None:
            object.__setattr__(self, "when", when)
        if agree:
            warn('Stages(agree=True) is Stages(level="best") now', DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "level", "best")
        if self.score is not None and self.allocate is None:
            object.__setattr__(self, "allocate", uniform)
        check_when(self)
        check_refit(self)
        if self.heads is not None and getattr(self.allocate, "per_head", False):
            raise IllegalComposition(
                "each head has a size of its own already: leave out one of the two methods"
            )
        if self.encode is not None and self.encode.pairs and not self._same_in_all_heads():
            raise IllegalComposition(
                "two layers are stored as a pair, so all their heads must keep the same entries: "
                "choose one that goes by position, such as streaming_llm_original:decode=append"
            )
        if self.token_pruning is not None and (self.score is not None or self.encode is not None):
            raise IllegalComposition(
                "tokens are pruned between the layers of the prompt's forward and stored as they "
                "come: nothing else selects or encodes them, so use that method alone"
            )
        if self.token_pruning is not None and self.needs.beyond_attention:
            raise IllegalComposition(
                "tokens are pruned between the layers by entries and attention alone: leave "
                "token ids, keys before RoPE, output norms and surprise out of Needs"
            )

    @property
    def evicts_while_decoding(self) -> bool:
        """True if a layer stays near its size however long the answer is."""
        return isinstance(self.when, (Hold, Rounds))

    @property
    def rounds(self) -> Rounds | None:
        """The rounds in which generated tokens leave; None if they do not in rounds."""
        return self.when if isinstance(self.when, Rounds) else None

    @property
    def interval(self) -> int | None:
        """Generated tokens between two rounds; None without rounds."""
        return None if self.rounds is None else self.rounds.every

    @property
    def keeps_prompt(self) -> bool:
        """True if all but the answer is kept beside the size."""
        return self.rounds is not None and self.rounds.prompt == "kept"

    @property
    def runs_own_forwards(self) -> bool:
        """True if the method reads a prompt with forwards of its own (KVzip, PyramidInfer)."""
        return self.token_pruning is not None or ContextReconstruction in self.needs

    @property
    def uniform(self) -> bool:
        """True if all layers are of one size."""
        return self.allocate is uniform

    def _same_in_all_heads(self) -> bool:
        evenly = self.uniform and self.heads is None
        return self.score is None or (self.score is recency and evenly)


@dataclass(frozen=True)
class Method:
    """Base of all methods: a frozen dataclass of the paper's hyper-parameters, without state."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    takes_budget: ClassVar[bool] = True
    # True if no stage mixes KV heads; tensor parallelism is exact only then
    by_head: ClassVar[bool] = False
    nested: ClassVar[bool] = False  # a smaller budget keeps a part of what a larger one keeps

    def stages(self) -> Stages:
        """The stages of this method; raises KvfoldError if a subclass does not define them."""
        raise KvfoldError(f"{type(self).__name__} names no stages")

    def brings(self) -> Stages:
        """The stages that it adds to other methods in a composition."""
        return self.stages()

    def brings_sizes(self) -> Stages | None:
        """The stages that it adds to a method that scores; None: as `brings`."""
        return None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [
            f"{f.name}={as_text(values[f.name])}"
            for f in dataclasses.fields(self)
            if values[f.name] != f.default
        ]
        return called(self) + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True)
class Composition(Method):
    """Several methods at once; each adds stages that the others do not set."""

    parts: tuple[Method, ...] = ()
    name: ClassVar[str] = "composition"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "several methods at once"

    @property
    def takes_budget(self) -> bool:  # type: ignore[override]
        """True if the part that sizes the layers takes a budget."""
        parts = zip(self.parts, self._brought(), strict=True)
        sizing = [(part, brought.allocate) for part, brought in parts if brought.allocate]
        unevenly = [part for part, allocate in sizing if allocate is not uniform]
        return any(part.takes_budget for part in unevenly or [part for part, _ in sizing])

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if no part mixes KV heads."""
        return all(part.by_head for part in self.parts)

    def stages(self) -> Stages:
        """Stages of all parts; raises IllegalComposition if two parts set the same stage."""
        merged: dict[str, Any] = {"needs": Needs()}
        owner: dict[str, Method] = {}
        for part, brought in zip(self.parts, self._brought(), strict=True):
            for name, value in _set_stages(brought).items():
                if name == "needs":
                    merged[name] = merged[name].joined(value)
                    continue
                if name == "inexact" and name in merged:
                    merged[name] += f"; {value}"
                    continue
                # A uniform allocation yields to a part that sizes layers otherwise.
                if value is uniform and name in merged:
                    continue
                if name in owner and merged[name] is not uniform:
                    also = ", or decode=append where it is offered" if name == "when" else ""
                    stage = "decode" if name == "when" else name
                    both = f"{owner[name]} and {part} both bring the {stage} stage"
                    raise IllegalComposition(f"{both}: choose one of them{also}")
                owner[name] = part
                merged[name] = value
        # Made only here: a part of a legal composition may be illegal alone.
        stages = Stages(**merged)
        held = getattr(stages.allocate, "in_rounds", False)
        if stages.evicts_while_decoding and not self.takes_budget and not held:
            raise IllegalComposition(
                f"{self} finds its sizes without a budget, so there is none to hold while "
                "decoding: choose decode=append where it is offered"
            )
        return stages

    def _brought(self) -> list[Stages]:
        """Stages that each part adds; if none scores, a part that can adds all of its stages.

        Rounds that a part without a score names replace those of the part that scores.
        """
        brought = [part.brings() for part in self.parts]
        able = [part for part in self.parts if type(part).brings is not Method.brings]
        if able and not any(stages.score for stages in brought):
            whole = max(able, key=lambda part: part.takes_budget)
            brought[self.parts.index(whole)] = whole.stages()
        if sum(stages.score is not None for stages in brought) > 1:
            sizing = [part.brings_sizes() for part in self.parts]
            brought = [sizes or stages for sizes, stages in zip(sizing, brought, strict=True)]
        return replaced_rounds(brought)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def called(method: Method) -> str:
    """Registered name of the method; the class's name if it is not registered itself."""
    return str(vars(type(method)).get("name") or type(method).__name__)


def spelled_out(method: Method) -> str:
    """Text with every option, from which `parse` makes this method even if defaults change."""
    if isinstance(method, Composition):
        return " + ".join(map(spelled_out, method.parts))
    options = [f"{f.name}={as_text(getattr(method, f.name))}" for f in dataclasses.fields(method)]
    return called(method) + (":" + ",".join(options) if options else "")


def is_registered(method: Method) -> bool:
    """True if another process can make the method from its `spelled_out` text."""
    return all(registered(called(part)) is type(part) for part in parts_of(method))


def origins(method: Method) -> dict[str, str]:
    """Module of each part that is not kvfold's own, by the part's name."""
    modules = {called(part): type(part).__module__ for part in parts_of(method)}
    return {name: of for name, of in modules.items() if not of.startswith("kvfold.")}


def parts_of(method: Method) -> tuple[Method, ...]:
    """The methods of a composition; of another method, itself."""
    return method.parts if isinstance(method, Composition) else (method,)


def with_part(method: Method, part: Method) -> Composition:
    """`method` composed with one more part; raises IllegalComposition for one that cannot be."""
    composed = Composition((*parts_of(method), part))
    composed.stages()
    return composed


def _set_stages(stages: Stages) -> dict[str, Any]:
    blank = Stages()
    return {
        f.name: getattr(stages, f.name)
        for f in dataclasses.fields(stages)
        if getattr(stages, f.name) != getattr(blank, f.name)
    }


def parse(spec: str | Method) -> Method:
    """Method of a text such as "snapkv:window=16,kernel=5"; "+" composes. A method is returned.

    In file names %2B stands for +, %2C for a comma, and %25 for a percent sign before two such
    digits. Raises KvfoldError for an unknown name or option, a value of the wrong kind or a number
    outside int32 or float32, and IllegalComposition if two parts add the same stage.
    """
    if isinstance(spec, Method):
        for part in parts_of(spec):
            check_options(part, called(part))
        return spec
    if isinstance(spec, type) and issubclass(spec, Method):
        raise KvfoldError(f"a method is an instance: write {spec.__name__}()")
    if not isinstance(spec, str):
        named = with_known_names(type(spec).__name__)
        known = f"write {named!r}" if registered(named) else 'write for example "snapkv:window=16"'
        raise KvfoldError(
            f"a method is a text, or an instance of a class derived from kvfold.Method, not "
            f"{str(spec)[:60]!r}: {known}"
        )
    if (named := plus_of(spec)) is not None:
        raise KvfoldError(f"an empty method name in {spec!r}, where + composes: write {named!r}")
    parts = [_parse_one(part.strip()) for part in spec.split("+")]
    for part in parts:
        check_options(part, called(part))
    if len(parts) == 1:
        return parts[0]
    composed = Composition(tuple(parts))
    composed.stages()
    return composed


def _parse_one(text: str) -> Method:
    name, _, options = text.partition(":")
    if not name:
        raise KvfoldError('an empty method name: write for example "snapkv:window=16"')
    method = preset(name.strip())
    values: dict[str, Any] = {}
    # A comma before a bare number continues a list: "skip_layers=0,-1" is "skip_layers=0/-1".
    options = re.sub(r",(?=\s*-?\d+\s*(,|$))", "/", options)
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, equals, value = (s.strip() for s in option.partition("="))
        if not equals or not value:
            raise KvfoldError(
                f"cannot read {option!r} in {text!r}: write option=value, and %2C for a comma in a "
                "file name"
            )
        values[key] = from_text(method, key, value)
    return dataclasses.replace(method, **values)
