# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: processes that share a model's KV heads, and the data they exchange.

Stages know nothing of ranks. Stages that compare heads get all-gathered heads; their result is
sliced to the local ones. All other stages treat each head alone. Besides, ranks agree on whether
anything is evicted from a layer, so that all of them store it in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.methods.base import Across, Heads, Measured, Method, Stages
from kvfold.methods.observation import Observation
from kvfold.observers.stored import OutputNorms

T = TypeVar("T")
# Fields of an Observation with heads as the second axis, besides positions
BY_KV_HEAD = ("keys", "values", "queries", "evictable", "bias")


@dataclass(frozen=True)
class Ranks:
    """This process among `size`; each holds as many of the model's KV `heads`, in their order."""

    rank: int = 0
    size: int = 1
    heads: int = 0

    @property
    def own_heads(self) -> slice | None:
        """The KV heads that this process holds, None for all."""
        if self.size == 1:
            return None
        each = self.heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def check_method(self, method: Method) -> None:
        """Raises KvfoldError for a method that may need more of other heads than is exchanged."""
        if self.size > 1 and not method.by_head:
            raise KvfoldError(
                f"{method} may have to see all KV heads at once, and each of {self.size} ranks "
                "holds only some: compress in one process, or with a method that decides by head, "
                "such as snapkv, adakv or kvzip"
            )

    def check_heads(self, stored: int) -> None:
        """Raises UnsupportedModel where a process does not store just its own KV heads."""
        if self.size > 1 and stored * self.size != self.heads:
            raise UnsupportedModel(
                f"each of {self.size} ranks stores {stored} of {self.heads} KV heads, so that some "
                "are stored twice: load this model in one process"
            )

    # --- stages that compare heads ----------------------------------------------------------

    def joining(self, stages: Stages) -> Stages:
        """Stages whose comparisons of heads cover all ranks.

        Raises KvfoldError for sizes measured by output norms, as each rank projects its own heads.
        """
        if self.size == 1:
            return stages
        heads, allocate = stages.heads, stages.allocate
        if isinstance(allocate, Measured) and OutputNorms in stages.needs:
            raise KvfoldError(
                "sizes that are measured by the norms of projected values need the weights of all "
                "heads, and each rank holds some: compress in one process"
            )
        if heads is not None:
            heads = partial(self._heads, heads)
        if isinstance(allocate, Across):
            allocate = dataclasses.replace(
                allocate,
                statistic=partial(self._statistic, allocate.statistic),
                share=partial(self._share, allocate.share),
            )
        elif isinstance(allocate, Measured):
            error = allocate.error
            allocate = dataclasses.replace(
                allocate,
                size=partial(self._size, allocate.size),
                error=None if error is None else partial(self._error, error),
            )
        return dataclasses.replace(stages, heads=heads, allocate=allocate)

    def _heads(self, share: Heads, scores: Tensor, per_head: Tensor) -> Tensor:
        least = per_head.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return self._own(share(self._joined(scores, -torch.inf), least))

    def _statistic(self, statistic: Callable[[Observation], Tensor], seen: Observation) -> Tensor:
        return self._joined(statistic(seen), -torch.inf)

    def _share(self, share: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
        return [self._own(counts) for counts in share(*args)]

    def _size(self, size: Callable[[Observation], Tensor], seen: Observation) -> Tensor:
        return self._own(size(self._observed(seen)))

    def _error(
        self, error: Callable[[Observation, Tensor], Tensor], seen: Observation, kept: Tensor
    ) -> Tensor:
        return error(self._observed(seen), self._joined(kept.byte()).bool())

    def all(self, here: Tensor) -> bool:
        """True if `here` is true on every rank."""
        if self.size > 1:
            here = here.int()
            dist.all_reduce(here, dist.ReduceOp.MIN)
        return bool(here)

    # --- exchange ---------------------------------------------------------------------------

    def _joined(self, own: Tensor, fill: float = 0) -> Tensor:
        """All ranks' heads `[B, H, …]`; of entries `[B, H, T, …]`, `fill` comes before fewer."""
        if own.dim() > 2:
            longest = torch.tensor(own.shape[2], device=own.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            missing = int(longest) - own.shape[2]
            own = F.pad(own, [0] * 2 * (own.dim() - 3) + [missing, 0], value=fill)
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, 1)

    def _own(self, of_all: Tensor) -> Tensor:
        """This rank's heads of `[B, H]`; `[B]` is the same for all."""
        return of_all if of_all.dim() == 1 else of_all[:, self.own_heads]

    def _observed(self, seen: Observation) -> Observation:
        """Observation of one layer with the heads of all ranks."""
        held = {name: getattr(seen, name) for name in BY_KV_HEAD}
        joined: dict[str, Any] = {
            name: None if own is None else self._joined(own) for name, own in held.items()
        }
        sink_logits = None if seen.sink_logits is None else self._joined(seen.sink_logits[None])[0]
        joined["positions"] = self._joined(seen.positions, -1)
        joined["observed"] = {
            kind: kind.of_ranks(value, self._joined, seen) for kind, value in seen.observed.items()
        }
        return dataclasses.replace(seen, sink_logits=sink_logits, attention=None, **joined)

    # --- work of one for all ----------------------------------------------------------------

    def on_first(self, mine: T, work: Callable[[list[T]], None]) -> None:
        """The first rank works with all ranks' inputs; all wait, and raise its KvfoldError.

        Inputs are pickled, and never take the memory of an accelerator.
        """
        if self.size == 1:
            return work([mine])
        group = dist.new_group(backend="gloo")
        everything: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, everything, group=group)
        problem: list[KvfoldError | None] = [None]
        if everything is not None:
            try:
                work(everything)
            except KvfoldError as met:
                problem = [met]
        dist.broadcast_object_list(problem, group=group)
        dist.destroy_process_group(group)
        if problem[0] is not None:
            raise problem[0]
