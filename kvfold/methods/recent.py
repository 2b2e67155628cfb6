# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import AddOn, Forced, Stages, register


@register("recent", formula="kept = the last tokens, and the best of the others within the budget")
@dataclass(frozen=True)
class Recent(AddOn):
    """Keeps the last tokens in every head, beside the best by another method: "kvzip + recent".

    The tokens that follow a text depend most on its end, of which such scores keep little. The last
    `tokens` count in the budget. Refused with methods that keep tokens of their own in any case,
    such as sinks or a window: they have options for it. Raises KvfoldError for fewer than 1.
    Source: kvfold's own.
    """

    beside: ClassVar[str] = "kvzip"
    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    tokens: int = 16  # last tokens that stay

    def __post_init__(self) -> None:
        self.check_range(1, None, "tokens")

    def brings(self) -> Stages:
        return Stages(forced=Forced(recent=self.tokens))
