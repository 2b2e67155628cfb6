# SPDX-License-Identifier: Apache-2.0
"""`Need`: an observation that a method asks for; `Observer`: what one layer holds for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.kernels.gather import pick
from kvfold.kernels.views import Named
from kvfold.observers.call import AttentionCall
from kvfold.store.base import Store
from kvfold.store.sequence import LogicalSequence

V = TypeVar("V", covariant=True)
N = TypeVar("N", bound="Need[Any]")
Rows = Callable[[Tensor], Tensor]  # a copying selection along the batch axis


class LayerPlan(Protocol):
    """A layer of a model, as observers see it; see `cache/plan.py`."""

    @property
    def rotation(self) -> Any:
        """Its RoPE."""

    @property
    def projection(self) -> Any:
        """Its W_o."""


class Layer(Protocol):
    """A layer, as its observers see it."""

    sequence: LogicalSequence

    @property
    def plan(self) -> LayerPlan:
        """The parts of it that never change."""

    @property
    def needs(self) -> Needs:
        """The kinds of observation."""

    @property
    def seen(self) -> int:
        """Columns of the logical sequence."""

    def stored(self) -> Store:
        """The store."""

    def columns(self) -> Tensor:
        """Columns of the stored entries `[B, H, T]`, −1 for padding and holes."""

    def positions(self) -> Tensor:
        """Positions of the stored entries `[B, H, T]`, −1 for padding and holes."""

    def key_positions(self) -> Tensor:
        """Positions to which the stored keys are rotated `[B, H, T]`."""

    def token_ids(self) -> Tensor | None:
        """Token ids `[B, N]` of all columns, −1 where unknown; None if all are."""

    def log(self, kind: type[Need[Any]]) -> Any:
        """The part of an observation that all layers share."""

    def stay(self) -> None:
        """Notes a change that no crop undoes."""

    @property
    def evicts_later(self) -> bool:
        """True if entries leave after the prefill's end, too."""


class Log(Protocol):
    """An observation of the forwards of a whole model, which ends when they have returned."""

    @property
    def waits(self) -> bool:
        """True while a forward runs, whose logits are not known."""

    def begin(self, ids: Tensor, start: int, prompt: bool, more: bool) -> None:
        """A forward of `ids [B, S]` begins at column `start`; `more` of its `prompt` follows."""

    def end(self, ids: Tensor, logits: Tensor | None, tokens: Tensor | None, frozen: bool) -> None:
        """It has returned, with `logits [B, S, V]`; `tokens [B, N]` is False at padding."""

    def forget_incoming(self) -> None:
        """No forward runs."""

    def end_reading(self) -> None:
        """The prompt is complete."""

    def freeze(self, frozen: bool) -> None:
        """A `frozen()` block begins or ends."""

    def crop(self, length: int) -> None:
        """Forgets the columns from `length` on."""

    def index(self, rows: Rows) -> None:
        """Applies `rows`, a selection along the batch axis."""

    def renumbered(self, ids: Rows, count: Callable[[int], int]) -> Log:
        """The log after an edit: `ids` moves numbers `[B, N]`, `count` numbers of columns."""

    def reset(self) -> None:
        """As before the first token."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""

    def save(self) -> dict[str, Tensor]:
        """Tensors of a file, by name."""

    def load(self, saved: dict[str, Tensor]) -> None:
        """Takes what `save` gave."""


@dataclass(frozen=True)
class Need(Generic[V]):
    """An observation that stages read as `observation[kind]`, whose value is a V.

    `empty`: the number of a hole, where the value is numbers of entries `[B, H, T]`; else None.
    `while_reading`: made in each forward of a prefill, else when entries are scored.
    `beyond_attention`: neither entries nor attention hold it. `reads_ids`: of tokens. `words`
    describe it to users.
    """

    empty: ClassVar[float | None] = None
    while_reading: ClassVar[bool] = False
    beyond_attention: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = False
    words: ClassVar[str] = ""
    keyword: ClassVar[str] = ""  # of `Needs`, and the field of an observation, until 0.2
    field: ClassVar[str] = ""

    def observer(self, fitted: Any = None) -> Observer[V]:
        """A new observer of one layer; `fitted` is what its file has for the layer, if any."""
        raise NotImplementedError

    def log(self) -> Log | None:
        """The part that all layers of a cache share; None without any."""
        return None

    def joined(self, other: Self) -> Self:
        """The need of two methods; IllegalComposition where one observation cannot serve both."""
        if self != other:
            raise IllegalComposition(
                f"the methods read different {self.words}, {self} and {other}: use one of them"
            )
        return self

    def rotates_back(self, needs: Needs) -> bool:
        """True if keys or queries are rotated back for it, one of these `needs`."""
        return False

    def describe(self) -> str:
        """Words for users; those of the class by default."""
        return self.words

    @classmethod
    def of_ranks(cls, value: Any, join: Callable[..., Tensor], seen: Any) -> Any:
        """The value of all ranks' heads; `join` puts tensors `[B, H, …]` of `seen` together."""
        return value if cls.empty is None else join(value, cls.empty)


@dataclass(frozen=True, init=False)
class Needs:
    """Observations that a method's stages read; the layers make no others. None stands for none.

    `only_attention`: the score reads attention data only, and not `layer`.
    """

    observed: tuple[Need[Any], ...]  # in the order of their types' names
    only_attention: bool

    def __init__(
        self, *observed: Need[Any] | None, only_attention: bool = False, **old: Any
    ) -> None:
        needs = {each for each in (*observed, *_of_old_names(old)) if each}
        ordered = sorted(needs, key=lambda each: type(each).__name__)
        object.__setattr__(self, "observed", tuple(ordered))
        object.__setattr__(self, "only_attention", only_attention)

    @cached_property
    def by_kind(self) -> dict[type[Need[Any]], Need[Any]]:
        """The needs by their type."""
        return {type(need): need for need in self.observed}

    def get(self, kind: type[N]) -> N | None:
        """The need of a `kind`; None if there is none."""
        found: N | None = self.by_kind.get(kind)  # type: ignore[assignment]
        return found

    def __contains__(self, kind: type[Need[Any]]) -> bool:
        return kind in self.by_kind

    @cached_property  # asked at every step
    def beyond_attention(self) -> bool:
        """True if stages read what neither entries nor attention hold."""
        return self.rotated_back or any(each.beyond_attention for each in self.observed)

    @cached_property  # asked at every step
    def rotated_back(self) -> bool:
        """True if stages read keys or queries before RoPE."""
        return any(each.rotates_back(self) for each in self.observed)

    @property
    def while_reading(self) -> tuple[Need[Any], ...]:
        """Observations made in each forward of a prefill, the window queries aside.

        All else is computed when the prefill ends.
        """
        return tuple(each for each in self.observed if each.while_reading)

    def joined(self, other: Needs) -> Needs:
        """Union of the needs of two methods; raises IllegalComposition as `Need.joined`."""
        both = {**other.by_kind, **self.by_kind}
        for kind in self.by_kind.keys() & other.by_kind.keys():
            both[kind] = self.by_kind[kind].joined(other.by_kind[kind])
        alone = self.only_attention or other.only_attention
        return Needs(*both.values(), only_attention=alone)

    def without(self, kind: type[Need[Any]]) -> Needs:
        """The others."""
        left = (each for each in self.observed if type(each) is not kind)
        return Needs(*left, only_attention=self.only_attention)


def kind_of(name: str, attribute: str) -> type[Need[Any]] | None:
    """The kind whose `keyword` or `field` was called `name`; None if there is none."""
    kinds = [kind for kind in Need.__subclasses__() if getattr(kind, attribute) == name]
    return kinds[0] if kinds else None


def _of_old_names(old: dict[str, Any]) -> Iterator[Need[Any]]:
    for name, given in old.items():
        kind = kind_of(name, "keyword") if name else None
        if kind is None:
            raise TypeError(f"Needs takes no {name}=")
        warn(f"Needs({name}=…) is Needs({kind.__name__}(…)) now", DeprecationWarning, stacklevel=4)
        if isinstance(given, kind):
            yield given
        elif given is True:
            yield kind()
        elif given:
            yield kind(given)  # type: ignore[call-arg]


class Observer(Generic[V]):
    """One layer's part of an observation: numbers of its entries, and its value.

    `numbers` are tensors `[B, H, ≤ T]` in the store's order, by the names that files have; they may
    end before the newest entries. `empties` has what stands for an entry without a number. `saved`
    are the names of other tensors of each KV head in files.
    """

    empties: ClassVar[dict[str, float]] = {}
    saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.numbers: dict[str, Tensor] = {}

    def fresh(self) -> Self:
        """A new observer for the same need."""
        return type(self)()

    # --- forwards -----------------------------------------------------------------------------

    def read(self, layer: Layer, call: AttentionCall) -> None:
        """Notes a forward after the layer's attention, frozen and repeated ones left out."""

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        """Notes a piece of a prefill."""

    def last_piece(self, layer: Layer) -> None:
        """Notes that the prefill's last piece has been read, before entries are scored."""

    def end_prefill(self, layer: Layer) -> None:
        """Notes that the value has been taken at a prefill's end."""

    def of(self, layer: Layer, call: AttentionCall | None) -> V | None:
        """The value, with the queries of `call`; None: there are none, as nothing is read."""
        return None

    # --- changes of the layer -----------------------------------------------------------------

    def select(self, slots: Tensor) -> None:
        """Keeps the numbers of the entries at `slots [B, H, K]`, −1 for holes."""
        for name, numbers in self.numbers.items():
            self.numbers[name] = pick_known(numbers, slots, self.empties[name])

    def per_entry(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change` to the numbers of entries."""
        self.numbers = {name: change(numbers) for name, numbers in self.numbers.items()}

    def index(self, rows: Rows) -> None:
        """Applies `rows` to all but the numbers."""

    def crop(self, seen: int) -> None:
        """Forgets the columns from `seen` on; the numbers aside."""

    def renumber(self, layer: Layer, columns: Tensor, shifts: Tensor) -> None:
        """Follows an edit: new `columns [B, N]`, −1 for those that leave, and their moves."""

    def nbytes(self) -> int:
        """Bytes of all that is held beside the numbers."""
        return 0

    # --- files --------------------------------------------------------------------------------

    def save(self, heads: int) -> tuple[Named, dict[str, Tensor]]:
        """Tensors of a layer of one row by name: of each of its KV `heads`, and whole."""
        return {}, {}

    def load(self, by_head: Named, whole: dict[str, Tensor]) -> None:
        """Takes what `save` gave out of `by_head`."""


def pick_known(numbers: Tensor, slots: Tensor, empty: float) -> Tensor:
    """As `pick`, of `numbers [B, H, ≤ T]`; `empty` also for the entries behind their end."""
    if numbers.shape[-1] == 0:
        return torch.full_like(slots, empty, dtype=numbers.dtype)
    return pick(numbers, slots.masked_fill(slots >= numbers.shape[-1], -1), empty)


def filled_up(numbers: Tensor, length: int, empty: float) -> Tensor:
    """Numbers `[B, H, length]`, `empty` for the newest entries that have none."""
    return F.pad(numbers, (0, length - numbers.shape[-1]), value=empty)


def per_stored_head(layer: Layer, scores: Tensor) -> Tensor:
    """Mean over the KV heads that share one stored head (several for latents)."""
    heads = layer.stored().keys.shape[1]
    return scores if scores.shape[1] == heads else scores.unflatten(1, (heads, -1)).mean(2)
