# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.methods.base import AddOn, Stages, register
from kvfold.methods.stages.select.blocks import best_of_chunks


@register(
    "chunkwise", formula="kept of chunk j: its best (b − forced)·len(j) / n,  of tokens j·length …"
)
@dataclass(frozen=True)
class Chunkwise(AddOn):
    """Keeps the same part of each chunk of a text: "knorm + chunkwise:length=1024".

    Another method scores; entries compete inside their chunk of `length` tokens only, so that no
    part of a text is forgotten. Forced entries stay beside, and the rest of the budget is shared by
    largest remainder in proportion to what each chunk holds. Different from kvpress, which rounds
    each chunk down and scores each chunk as a text of its own. Raises KvfoldError for a length
    below 1.
    Source: NVIDIA/kvpress `chunk_press.py`.
    """

    beside: ClassVar[str] = "knorm"
    by_head: ClassVar[bool] = True
    length: int = 1024  # tokens of a chunk

    def __post_init__(self) -> None:
        self.check_range(1, None, "length")

    def brings(self) -> Stages:
        return Stages(select=partial(best_of_chunks, length=self.length))
