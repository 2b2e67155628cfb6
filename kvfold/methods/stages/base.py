# SPDX-License-Identifier: Apache-2.0
"""`Stages`: all stages of a method, and those that exclude one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import get_args
from warnings import warn

from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.parts import PartsSource
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.merge.base import MergeStages
from kvfold.methods.stages.refit.base import Refit
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.stages.select.one_set import Level, Rule
from kvfold.methods.stages.when import AtEnd, Hold, Once, Positions, Rounds, When, of_old_options
from kvfold.observers.base import Needs
from kvfold.observers.last_queries import window_of
from kvfold.observers.query_moments import QueryMomentsNeed
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed, repeats_references
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
    # what heads keep is made one set of tokens by a rule, or whole pages of so many entries
    shape: Level | int | None = None
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
    # What `shape` replaces, until 0.2
    agree: InitVar[bool] = False
    level: InitVar[Level | None] = None

    def __post_init__(
        self,
        decode: str | None,
        every: int | None,
        prompt: str | None,
        sizes: str | None,
        phase: str | None,
        agree: bool,
        level: Level | None,
    ) -> None:
        old = {"decode": decode, "every": every, "prompt": prompt, "sizes": sizes, "phase": phase}
        when = of_old_options(old)
        if when is not None:
            object.__setattr__(self, "when", when)
        if agree or level is not None:
            shape: Level = "best" if level is None else level
            told = "agree=True" if level is None else f"level={level!r}"
            warn(f"Stages({told}) is Stages(shape={shape!r}) now", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "shape", shape)
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
        evenly = self.uniform and self.heads is None and not isinstance(self.shape, int)
        return self.score is None or (self.score is recency and evenly)


def check_when(stages: Stages) -> None:
    """Raises IllegalComposition for stages that do not go with the times at which entries leave."""
    if stages.positions not in get_args(Positions):
        known = " or ".join(get_args(Positions))
        raise IllegalComposition(f"positions is {known}, not {stages.positions!r}")
    hold = isinstance(stages.when, Hold)
    if stages.shape == "best" and (stages.heads or not stages.uniform or hold):
        raise IllegalComposition(
            "all layers and heads keep the same tokens, so they are of one size, and none evicts "
            "alone while decoding: leave out the method that sizes layers or heads"
        )
    if stages.shape in get_args(Rule) and stages.evicts_while_decoding:
        raise IllegalComposition(
            "level makes one set of tokens when a prefill ends, and heads that evict while "
            "decoding would part again: choose decode=append where it is offered"
        )
    _check_pages(stages)
    _check_observed(stages)
    _check_one_by_one(stages)
    _check_positions(stages)


def rounds_hold(stages: Stages) -> bool:
    """True if rounds of 1 evict for each generated token as `Hold` does.

    They cannot where a round reads queries of the answer, or does what `Hold` refuses.
    """
    if stages.rounds is None or stages.rounds.every > 1:
        return False
    needs, as_if_held = stages.needs, stages.rounds.prompt == "counted" and stages.shape is None
    others = stages.heads, stages.select, stages.encode, stages.refit, needs.get(QueryMomentsNeed)
    return (
        as_if_held and stages.positions != "consecutive" and not (window_of(needs) or any(others))
    )


def _check_pages(stages: Stages) -> None:
    """Raises IllegalComposition for stages that leave parts of pages."""
    if not isinstance(stages.shape, int):
        return
    if isinstance(stages.when, Hold):
        raise IllegalComposition(
            "pages are made of many entries at once, and this method evicts one for each generated "
            "token: choose decode=append where it is offered, and every:interval=128 for rounds"
        )
    if stages.encode is not None and stages.encode.recalls:
        raise IllegalComposition(
            "recall keeps every entry, so none leaves in pages: choose one of the two"
        )
    if stages.positions == "reindex":
        raise IllegalComposition(
            "re-indexed positions rotate stored keys, which must then be dense, and heads in pages "
            'differ in how many they keep: choose positions="original"'
        )


def _check_observed(stages: Stages) -> None:
    """Raises IllegalComposition for stages that read what is not there when they run."""
    if isinstance(stages.when, Once) and window_of(stages.needs) > 1:
        raise IllegalComposition(
            "compression at the first generated token sees the query of that token alone, and "
            f"{window_of(stages.needs)} queries are needed: choose a method that compresses at the "
            "prompt's end, such as simlayerkv:when=last_query"
        )
    if stages.rounds and stages.runs_own_forwards:
        raise IllegalComposition(
            "forwards of its own run when a prompt ends, not while an answer is generated: "
            "leave every out, or choose another method that scores"
        )


def _check_one_by_one(stages: Stages) -> None:
    """Raises IllegalComposition for stages that cannot evict while tokens come one by one."""
    per_head = getattr(stages.allocate, "per_head", False)
    held = stages.rounds and getattr(stages.allocate, "in_rounds", False)
    if stages.evicts_while_decoding and per_head and not held:
        raise IllegalComposition(
            "an allocation per head is made when a prefill ends, so it does not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if stages.rounds and stages.rounds.sizes == "again" and per_head:
        raise IllegalComposition(
            "sizes=again shares a layer's size among its heads, whose sizes another method gives: "
            "leave sizes=again out"
        )
    alone = stages.encode is None or (stages.rounds and stages.encode.standalone)
    if stages.evicts_while_decoding and not alone:
        raise IllegalComposition(
            "encoded entries cannot be evicted one by one, so an encoding cannot follow a "
            "method that evicts while decoding: choose decode=append where it is offered"
        )
    if isinstance(stages.when, Hold) and stages.heads is not None:
        raise IllegalComposition(
            "budgets per head are set when a prefill ends, so they do not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if isinstance(stages.when, Hold) and stages.select is not None:
        raise IllegalComposition(
            "entries that leave one by one while decoding are those of lowest score, so a "
            "method that selects otherwise does not go with a method that evicts while "
            "decoding: choose decode=append where it is offered"
        )


def _check_positions(stages: Stages) -> None:
    """Raises IllegalComposition for re-indexed positions of keys that cannot be rotated."""
    if stages.positions == "reindex" and (stages.encode or stages.heads):
        raise IllegalComposition(
            "re-indexed positions rotate stored keys, which must then be whole and dense: "
            'choose positions="original"'
        )
    if stages.positions == "consecutive" and (stages.encode or stages.token_pruning):
        raise IllegalComposition(
            "consecutive positions rotate kept keys at each eviction, and encoded entries, or "
            'tokens pruned between the layers, cannot be rotated: choose positions="original"'
        )
    if stages.positions == "consecutive" and isinstance(stages.when, Hold):
        raise IllegalComposition(
            "consecutive positions would rotate all kept keys at every step of a method that "
            "evicts while decoding: choose decode=append where it is offered"
        )


def check_refit(stages: Stages) -> None:
    """Raises IllegalComposition for stages that a refit cannot follow."""
    recalls = stages.encode is not None and stages.encode.recalls
    if recalls and (stages.refit or stages.merge):
        raise IllegalComposition(
            "kept entries stand for those that leave after a refit or a merge, and recall reads "
            "these themselves: choose one of the two"
        )
    if stages.refit is None:
        return
    if stages.merge is not None:
        raise IllegalComposition(
            "a refit starts from keys and values as the model made them, and merging changes "
            "them: choose one of the two"
        )
    need = stages.needs.get(ReferencesNeed)
    on_policy = need is not None and need.on_policy and stages.score is not None
    if on_policy and not repeats_references(stages.needs):
        raise IllegalComposition(
            "on-policy queries are those of a repetition, which the other method does not run: "
            "compose match:on_policy=true with kvzip"
        )
    if stages.positions != "original":
        raise IllegalComposition(
            "a refit fits entries to queries at their positions, which the other method changes: "
            'choose positions="original"'
        )
