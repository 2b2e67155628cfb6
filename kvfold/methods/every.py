# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.base import Method, Stages, register


@register(
    "every",
    paper="",
    formula="""
        after generated token g with g mod interval = 0:
        kept = the b best entries of each KV head by the other method's score
    """,
)
@dataclass(frozen=True)
class Every(Method):
    """Brings generated tokens back to the size every so often, by another method's score.

    1. When a prompt ends, the other method compresses it: "snapkv + every:interval=128".
    2. Generated tokens are appended. After each `interval` of them every layer above its size is
       brought back to it, by the method's scores of all stored entries. The observation window is
       that of the last queries, of the prompt too if the answer is still short.

    A head thus stores its size and at most `interval` entries more. A budget in tokens or bytes
    that a prompt does not fill is filled by the answer. Sizes of layers and of heads are those that
    the end of the prompt gave them; heads that kept everything then are sized when entries first
    leave. `prompt="kept"` evicts nothing when a prompt ends, and the budget is that of the answer.
    Different from kvpress's DecodingPress: tokens are counted, not forwards; the window's queries
    are those that attended, not rebuilt at one position; entries stay in the order of the text.
    Raises KvfoldError for an interval below 1.
    """

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    interval: int = 128  # generated tokens between evictions
    prompt: Literal["counted", "kept"] = "counted"  # the prompt is part of the size, or beside it

    def __post_init__(self) -> None:
        if type(self.interval) is not int or self.interval < 1:
            raise KvfoldError(f"every:interval is at least 1 token, not {self.interval!r}")

    def stages(self) -> Stages:
        raise IllegalComposition(
            f"{self} scores nothing itself: compose it with a method that evicts by scores, for "
            f'example "snapkv + {self}"'
        )

    def brings(self) -> Stages:
        return Stages(decode="every", every=self.interval, prompt=self.prompt)
