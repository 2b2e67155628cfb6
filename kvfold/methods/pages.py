# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import AddOn, Stages, register


@register(
    "pages",
    paper="",
    formula="""
        pages[h] = ⌊n[h] / size⌋, and 1 more where n[h] mod size is among the largest
        Σ_h pages[h] = ⌊Σ_h n[h] / size⌋;  n[h]: entries that head h would keep by itself
    """,
)
@dataclass(frozen=True)
class Pages(AddOn):
    """Each head keeps whole pages of `size` entries, those that another method scores highest.

    For engines whose pages hold entries of one head: "snapkv + pages:size=16". The pages of a layer
    are as many as all its heads' entries fill, so that heads may differ by one; where the sizes of
    all layers are made together ("kvzip + pages"), they are counted over all layers. Each eviction
    counts anew, in rounds too ("snapkv + every + pages"); tokens that come after it fill new pages.

    1. Where nothing has to leave the heads that share pages, all stays, last pages part-filled.
    2. Entries that stay whatever their score have pages of their own, beyond the budget if need be;
       a head that stores too few to fill these keeps all.
    3. No other head keeps a part of a page: one that stores less than a page keeps nothing.

    Raises BudgetError for a budget below a page per layer. Refused for methods that evict at each
    step, that select whole chunks or otherwise than by score, or that keep heads or layers whole
    (duo), and for recall.
    """

    beside: ClassVar[str] = "snapkv"
    size: int = 32  # entries of a page, of one head

    def __post_init__(self) -> None:
        if self.size < 1:
            raise KvfoldError(f"pages:size is at least 1 entry, not {self.size}")

    def brings(self) -> Stages:
        return Stages(shape=self.size, inexact=f"heads keep whole pages of {self.size} entries")
