# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import AddOn, Stages, register
from kvfold.methods.stages.select.spans import best_of_spans


@register(
    "fair",
    paper="arXiv 2510.00231",
    formula="""
        b_s = b · n_s / n, by largest remainder,  n_s = tokens of span s
        kept = the b_s best tokens of each span by the other method's score
    """,
)
@dataclass(frozen=True)
class Fair(AddOn):
    """Each span of a prompt keeps its share of the budget: "snapkv + fair:spans=0/40/40/90".

    `spans` are starts and stops in turn, tokens of a row, half open; all other tokens are one span
    more. For instructions beside a document, or the tokens of images, which another method's scores
    would starve. Forced tokens count for their span. `kvfold.span` finds a part of a text,
    `kvfold.image_spans` the images of a prompt. Raises KvfoldError for spans that are no pairs or
    overlap.
    Source: Chen et al., section 5.
    """

    beside: ClassVar[str] = "snapkv"
    by_head: ClassVar[bool] = True
    spans: tuple[int, ...] = ()  # start and stop of each span in turn

    def __post_init__(self) -> None:
        listed = (0, *self.spans)
        rising = all(first <= second for first, second in pairwise(listed))
        if len(self.spans) % 2 or not rising or any(stop <= start for start, stop in self._pairs()):
            raise KvfoldError(
                "fair:spans are starts and stops in turn, ascending and without overlap, such as "
                f"spans=0/40/40/90, not {'/'.join(map(str, self.spans))}"
            )

    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.spans[::2], self.spans[1::2], strict=True))

    def brings(self) -> Stages:
        return Stages(select=partial(best_of_spans, spans=self._pairs()))
