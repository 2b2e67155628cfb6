# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import AddOn, Stages, register


@register(
    "pages",
    paper="",
    formula="""
        kept[h] = size · pages[h] + rest;  rest = seen mod size: the last tokens, in each head
        pages[h] = ⌊m[h] / size⌋, and 1 more where m[h] mod size is among the largest
        Σ_h pages[h] = ⌊Σ_h m[h] / size⌋;  m[h] = n[h] − rest, n[h]: what h would keep by itself
    """,
)
@dataclass(frozen=True)
class Pages(AddOn):
    """Each head keeps whole pages of `size` entries, near those that another method chooses.

    For engines whose pages hold entries of one head: "snapkv + pages:size=16". The pages of a layer
    are as many as all its heads' entries fill, so that heads may differ by one; where the sizes of
    all layers are made together ("kvzip + pages"), they are counted over all layers. Each eviction
    counts anew, in rounds too ("snapkv + every + pages").

    1. The rest, tokens of the text's last and unfilled page, stays in each head, inside the budget.
       It is beside whole pages, until tokens that come fill its page.
    2. Where nothing has to leave the heads that share pages, all stays.
    3. Other entries that stay whatever their score have pages of their own, beyond the budget if
       need be; a head that stores too few to fill these keeps all.
    4. A head with more room than its choice gets the highest scores besides; one with less keeps
       the best of its choice.
    5. No other head keeps a part of a page: one that stores less than a page keeps the rest alone.
    6. Where the rest leaves less than a page per layer, so many are kept all the same, beyond the
       budget.

    Raises BudgetError for a budget below a page per layer. Refused for methods that evict at each
    step, or that keep heads or layers whole (duo), and for recall.
    """

    beside: ClassVar[str] = "snapkv"
    size: int = 32  # entries of a page, of one head

    def __post_init__(self) -> None:
        if self.size < 1:
            raise KvfoldError(f"pages:size is at least 1 entry, not {self.size}")

    def brings(self) -> Stages:
        pages = f"whole pages of {self.size} entries beside the text's last, unfilled one"
        return Stages(shape=self.size, inexact=f"heads keep {pages}")
