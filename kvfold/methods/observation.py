# SPDX-License-Identifier: Apache-2.0
"""`Observation`: a layer's data for a method's stages; `Needs`: the parts of it a method reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.kernels.gather import pick, take
from kvfold.kernels.mean_rotation import mean_rotation
from kvfold.kernels.query_moments import QueryMoments
from kvfold.methods.fitted import FittedFile
from kvfold.store.entry_norms import On
from kvfold.store.reindexed_sinks import Rotate

OutputNorm = Literal["l2", "l1"]
# values [B, H, T, Dv] → norms [B, Hq, T] of what each query head adds to the model's dimension
ProjectedNorms = Callable[[Tensor], Tensor]
# Observation → scores [B, H, T], float32, of a fitted scorer
FittedScores = Callable[["Observation"], Tensor]


@dataclass(frozen=True)
class ContextReconstruction:
    """Options of KVzip's reconstruction: forwards that let the model repeat the text in parts.

    With a file of `questions`, a line each, these are read after the text, and nothing is repeated.
    """

    chunk: int  # tokens of a part
    first: str  # prompt that asks for the first part
    later: str  # prompt that asks for a later part, before the `previous` tokens
    previous: int  # last tokens of the preceding part that a later prompt quotes
    instruction: str = ""  # text before the context; it does not count in the budget
    head_scores: str | None = None  # file of head scores; nothing is repeated then
    normalize: bool = False  # attention times ‖W_o v‖ of the entry over ‖h‖ of the query (KVzip+)
    demote: float = 0.0  # factor of the scores of structural tokens, 0: none
    demote_repeats: int = 4  # occurrences in the text from which a token may be structural
    rms: bool = False  # root of the mean square of attention, instead of its maximum
    questions: str | None = None  # file of them


@dataclass(frozen=True)
class QueryMomentsNeed:
    """Moments of queries before RoPE: of a prefill's, or `running`."""

    skip: int = 0  # first tokens of each row whose queries are left out
    covariance: bool = True  # beside the mean
    moduli: bool = False  # beside the mean: mean length of each rotary pair
    running: bool = False  # those of generated tokens count too, from the next round on
    fitted: FittedFile | None = None  # those of other texts, from a file, instead


@dataclass(frozen=True)
class ChunkSumsNeed:
    """Attention of a prefill inside chunks: unmasked, unscaled, summed over the chunk's queries."""

    size: int  # tokens of a chunk; the last one of a prefill may be shorter
    first: int = 0  # first tokens of each row, which are in no chunk
    last: int = 0  # last tokens of a prefill, which are a chunk by themselves


@dataclass(frozen=True)
class ReferencesNeed:
    """Queries that kept entries are fitted to: of a prefill's tokens, or of their repetition."""

    queries: int  # most queries of a KV head
    repeated: bool  # those of the reconstruction where the method has one
    on_policy: bool = False  # as the layers below make them once they are refitted
    by_share: bool = True  # each counts by the attention that the entries receive of it


@dataclass(frozen=True)
class SurpriseNeed:
    """Surprise of the model at each token that it read: −ln p, by its own logits."""

    decay: float = 1.0  # factor of all older numbers when another prompt is read


@dataclass(frozen=True)
class Needs:
    """Data that a method's stages read; the layers observe nothing else."""

    window: int = 0  # last queries of the prefill
    column_sums: bool = False  # attention that each entry received, summed over queries
    column_squares: bool = False  # squared attention that each entry received, summed over queries
    # maximum attention that each entry received during the reconstruction
    reconstruction: ContextReconstruction | None = None
    only_attention: bool = False  # the score reads attention data only, and not `layer`
    norms: On | None = None  # norms of keys or of values, for `merge_one`
    token_ids: bool = False  # each entry's token
    unrotated: bool = False  # keys before RoPE
    output_norms: OutputNorm | None = None  # norms of values, projected into the model's dimension
    query_moments: QueryMomentsNeed | None = None  # mean and covariance of queries before RoPE
    chunk_sums: ChunkSumsNeed | None = None  # attention inside chunks, summed over queries
    scorer: FittedFile | None = None  # of entries
    fitted_heads: FittedFile | None = None  # numbers of each KV head
    references: ReferencesNeed | None = None  # queries that kept entries are fitted to
    previous_scores: bool = False  # of the last eviction, for entries that it kept
    surprise: SurpriseNeed | None = None  # −ln p of each entry's token

    @cached_property  # asked at every step
    def beyond_attention(self) -> bool:
        """True if stages read what neither entries nor attention hold."""
        others = self.output_norms, self.chunk_sums, self.surprise, self.scorer, self.fitted_heads
        own = self.token_ids or self.previous_scores
        return own or self.rotated_back or any(each is not None for each in others)

    @cached_property  # asked at every step
    def rotated_back(self) -> bool:
        """True if stages read keys or queries before RoPE."""
        moved = self.references is not None and not self.repeats_references
        return self.unrotated or self.query_moments is not None or moved

    @property
    def repeats_references(self) -> bool:
        """True if reference queries are those of the reconstruction, not the prefill's own."""
        how = self.reconstruction
        repeats = how is not None and how.head_scores is None
        return repeats and self.references is not None and self.references.repeated

    @property
    def while_reading(self) -> tuple[object, ...]:
        """Observations made in each forward of a prefill, the window queries aside.

        All else is computed when the prefill ends.
        """
        return (
            self.column_sums,
            self.column_squares,
            self.reconstruction,
            self.query_moments,
            self.chunk_sums,
            self.references,
            self.surprise,
        )

    def joined(self, other: Needs) -> Needs:
        """Union of the needs of two methods.

        IllegalComposition for different output norms or chunks, and for moments of different
        queries.
        """
        if self.output_norms and other.output_norms and self.output_norms != other.output_norms:
            raise IllegalComposition(
                "one method reads L1 norms of projected values, the other L2 norms: use one of them"
            )
        if len({self.chunk_sums, other.chunk_sums} - {None}) > 1:
            raise IllegalComposition(
                "the methods read attention inside different chunks: use one of them"
            )
        moments = {self.query_moments, other.query_moments} - {None}
        if len(moments) > 1:
            raise IllegalComposition(
                "the methods leave different first tokens out of the queries' moments, or read "
                "different moments: use one of them"
            )
        return Needs(
            max(self.window, other.window),
            self.column_sums or other.column_sums,
            self.column_squares or other.column_squares,
            self.reconstruction or other.reconstruction,
            self.only_attention or other.only_attention,
            self.norms or other.norms,
            self.token_ids or other.token_ids,
            self.unrotated or other.unrotated,
            self.output_norms or other.output_norms,
            self.query_moments or other.query_moments,
            self.chunk_sums or other.chunk_sums,
            self.scorer or other.scorer,
            self.fitted_heads or other.fitted_heads,
            self.references or other.references,
            self.previous_scores or other.previous_scores,
            self.surprise or other.surprise,
        )


@dataclass(frozen=True)
class Observation:
    """One layer's entries, window queries and attention statistics; a field is None unless needed.

    In decode eviction, layers of one shape are joined for scores with `only_attention`: their rows
    follow one another in B, and keys, values and positions hold no entries (T is 0).
    """

    keys: Tensor  # [B, H, T, D], after RoPE
    values: Tensor  # [B, H, T, Dv]
    positions: Tensor  # [B, H, T], −1 for padding and holes; int64, in decode eviction int32
    queries: Tensor | None = None  # [B, Hq, W, D], the last W of the prefill, W = Needs.window
    query_positions: Tensor | None = None  # [B, W], −1 for padding
    attention: Tensor | None = None  # [B, Hq, 1, T], weights of a decode step's query
    column_sums: Tensor | None = None  # [B, H, T], over queries, of the mean over the group
    column_squares: Tensor | None = None  # [B, H, T], over queries, of the mean's square
    reconstruction_scores: Tensor | None = (
        None  # [B, H, T], maximum over the group and all queries (KVzip)
    )
    # [B, H, T], mean over the group; 1, the mean of a chunk, for entries that no chunk holds
    chunk_sums: Tensor | None = None
    tokens_seen: Tensor | None = None  # [B], without padding
    budget: Tensor | None = None  # [B], entries that each head of a row may keep
    # [B, H, T], for sizes of heads across layers: +∞ at forced entries, −∞ at padding and in the
    # prefix, 0 elsewhere
    candidates: Tensor | None = None
    evictable: Tensor | None = None  # [B, H, T], bool: entries that this eviction may take
    layer: int = 0  # index among `layers`
    layers: int = 1
    scale: float = 1.0  # of the logits
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [Hq] (GPT-OSS)
    seed: int = 0  # of this eviction's random draws
    token_ids: Tensor | None = None  # [B, H, T], −1 for padding, for holes, and where unknown
    key_positions: Tensor | None = None  # [B, H, T], to which RoPE has rotated each key
    rotate: Rotate | None = None  # the layer's RoPE; see `unrotated`
    query_moments: QueryMoments | None = None  # of queries before RoPE
    norms_of_outputs: ProjectedNorms | None = None  # see `output_norms`
    scorer: FittedScores | None = None  # this layer's; see `learned_scores`
    fitted_heads: Tensor | None = None  # [H], fitted numbers of this layer's KV heads
    bias: Tensor | None = None  # [B, H, T], float32, added to the entries' logits
    # [B, H, T], of the method's last eviction; 0 for entries that it did not score
    previous_scores: Tensor | None = None
    surprise: Tensor | None = None  # [B, H, T], −ln p of each entry's token, float32
    prompt_tokens: Tensor | None = None  # [B], of the prompt that has just ended, 0 in rounds
    most_queries: int | None = None  # that a stage may read: Needs.window; None: all there are

    def padding_first(self) -> tuple[Observation, Tensor | None]:
        """Observation with padding moved to the left, and the slots `[B, H, T]` in that order.

        The order is None if padding is on the left already.
        """
        padding = self.positions < 0
        if not bool((padding[..., 1:] & ~padding[..., :-1]).any()):
            return self, None
        order = (~padding).long().argsort(stable=True, dim=-1)

        def moved(per_entry: Tensor | None) -> Tensor | None:
            return None if per_entry is None else per_entry.gather(2, order)

        again = dataclasses.replace(
            self,
            keys=take(self.keys, order),
            values=take(self.values, order),
            positions=self.positions.gather(2, order),
            attention=None,
            column_sums=moved(self.column_sums),
            column_squares=moved(self.column_squares),
            reconstruction_scores=moved(self.reconstruction_scores),
            chunk_sums=moved(self.chunk_sums),
            candidates=moved(self.candidates),
            evictable=moved(self.evictable),
            token_ids=moved(self.token_ids),
            key_positions=moved(self.key_positions),
            bias=moved(self.bias),
            previous_scores=moved(self.previous_scores),
            surprise=moved(self.surprise),
        )
        return again, order

    @property
    def window(self) -> int:
        """Number of window queries W; 0 if there are none."""
        return 0 if self.queries is None else self.queries.shape[2]

    def at(self, slots: Tensor) -> Observation:
        """Observation of the entries at `slots [B, H, K]` only, −1 for holes; no statistics."""

        def picked(per_entry: Tensor | None, empty: float) -> Tensor | None:
            return None if per_entry is None else pick(per_entry, slots, empty)

        return dataclasses.replace(
            self,
            keys=take(self.keys, slots),
            values=take(self.values, slots),
            positions=pick(self.positions, slots, -1),
            attention=None,
            column_sums=None,
            column_squares=None,
            reconstruction_scores=None,
            chunk_sums=None,
            candidates=None,
            evictable=None,
            token_ids=picked(self.token_ids, -1),
            key_positions=picked(self.key_positions, 0),
            bias=picked(self.bias, 0),
            previous_scores=picked(self.previous_scores, 0),
            surprise=picked(self.surprise, 0),
        )

    def unrotated(self) -> Tensor:
        """Keys `[B, H, T, D]` before RoPE, float32; its attention factor (YaRN) stays inside them.

        Raises KvfoldError for a method that does not need them.
        """
        if self.rotate is None or self.key_positions is None:
            raise KvfoldError("un-rotated keys are for methods with Needs(unrotated=True)")
        at = self.key_positions
        at = at[:, 0] if at.stride(1) == 0 else at  # angles of one head serve all
        return self.rotate(self.keys.float(), -at)

    def future_query_moments(self, future: int) -> QueryMoments:
        """Moments of the prefill's queries, turned by the mean rotation of the next positions.

        These are the `future` positions after each row's last token. Raises KvfoldError for a
        method that does not need moments of queries.
        """
        if self.query_moments is None or self.rotate is None or self.tokens_seen is None:
            raise KvfoldError("moments of queries are for methods with Needs(query_moments=...)")
        size = self.keys.shape[-1]
        return self.query_moments.turned(mean_rotation(self.rotate, self.tokens_seen, future, size))

    def output_norms(self) -> Tensor:
        """‖W_o v‖ `[B, Hq, T]`, float32: norms of values as each query head projects them.

        L1 or L2 norms in the model's dimension, as `Needs.output_norms` says; of padding, any
        number. Raises KvfoldError for a method that does not need them.
        """
        if self.norms_of_outputs is None:
            raise KvfoldError('output norms are for methods with Needs(output_norms="l2"), or "l1"')
        return self.norms_of_outputs(self.values)

    def learned_scores(self) -> Tensor:
        """Scores `[B, H, T]`, float32, of the fitted scorer; of padding, any number.

        Raises KvfoldError for a method that does not need one.
        """
        if self.scorer is None:
            raise KvfoldError("fitted scores are for methods with Needs(scorer=…)")
        return self.scorer(self)

    def window_logits(self, last: int) -> Tensor:
        """Logits `[B, H, G, last, T]` of the last queries, float32; of hidden entries too.

        Raises KvfoldError as `window_attention`.
        """
        self._check_window(last)
        assert self.queries is not None
        queries = self.queries[:, :, -last:]
        batch, _, window, size = queries.shape
        heads, stored = self.keys.shape[1:3]
        # Products of queries and keys may exceed float16 before they are scaled.
        grouped = queries.reshape(batch, heads, -1, size) * self.scale
        logits = (grouped @ self.keys.transpose(-1, -2)).float()
        logits = logits.view(batch, heads, -1, window, stored)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.bias is not None:
            logits = logits + self.bias[:, :, None, None]
        return logits

    def window_attention(self, last: int) -> Tensor:
        """Attention weights `[B, Hq, last, T]` of the last queries, float32.

        Queries that see no stored entry, as padding, have rows of 0. Fewer rows for a text of fewer
        tokens. Raises KvfoldError for more queries than the method needs.
        """
        if last == 1 and self.attention is not None:
            return self.attention
        logits = self.window_logits(last)
        assert self.query_positions is not None
        at = self.query_positions[:, -last:]
        entries = self.positions[:, :, None, None, :]
        hidden = (entries < 0) | (entries > at[:, None, None, :, None])
        logits = logits.masked_fill(hidden, -torch.inf).flatten(1, 2)
        if self.sink_logits is not None:
            extra = self.sink_logits.float().view(1, -1, 1, 1)
            extra = extra.expand(len(logits), -1, logits.shape[2], 1)
            rows = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            rows = logits.softmax(-1)
        blind, grouped = hidden.all(-1, keepdim=True), rows.unflatten(1, (entries.shape[1], -1))
        seen: Tensor = grouped.masked_fill(blind, 0.0).flatten(1, 2)
        return seen

    def _check_window(self, last: int) -> None:
        """Raises KvfoldError for no queries, and for more than the method needs."""
        most = 0 if self.queries is None else self.most_queries
        if last < 1:
            raise KvfoldError(f"an observation window is at least 1 query, not {last}")
        if most is not None and last > most:
            raise KvfoldError(
                f"attention of the last {last} queries is for methods with Needs(window={last}) or "
                f"more: this one has Needs(window={most})"
            )

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """Mean over the query heads of each group: `[B, Hq, …]` → `[B, H, …]`."""
        heads = self.keys.shape[1]
        grouped: Tensor = per_query_head.unflatten(1, (heads, -1))
        return grouped.mean(2)
