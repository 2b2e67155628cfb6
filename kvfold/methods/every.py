# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import AddOn, Method, Stages, parse, register, with_part
from kvfold.methods.stages.when import Counting, Prompt, Rounds, Sizes


@register(
    "every",
    paper="",
    formula="""
        after generated token g with g mod interval = 0:
        kept = the b best entries of each KV head by the other method's score
    """,
)
@dataclass(frozen=True)
class Every(AddOn):
    """Evicts again at intervals of generated tokens, by another method's score.

    1. When a prompt ends, the other method compresses it: "snapkv + every:interval=128".
    2. Generated tokens are appended. After each `interval` of them every layer above its size is
       brought back to it, by the method's scores of all stored entries. The observation window
       holds the last queries, those of the prompt too while the answer is short.

    A head thus stores its size and at most `interval` entries more. A budget in tokens or bytes
    that a prompt does not fill is filled by the answer. Sizes of layers are those that the end of
    the prompt gave them, and so are sizes of heads; heads that kept everything then are sized when
    entries first leave. `sizes="again"` shares a layer's size among its heads at each eviction.
    `prompt="kept"` evicts nothing when a prompt ends, and the budget is that of the answer.
    `phase="absolute"` evicts where the whole text, prompt included, reaches multiples of
    `interval`; in a batch, where its longest row does. Rounds that the other method names itself
    are replaced: "rkv + every:interval=64".
    Different from kvpress's DecodingPress: tokens are counted, not forwards; the window's queries
    are those that attended, not rebuilt at one position; entries stay in the order of the text.
    Raises KvfoldError for an interval below 1.
    """

    beside: ClassVar[str] = "snapkv"
    by_head: ClassVar[bool] = True
    interval: int = 128  # generated tokens between evictions
    prompt: Prompt = "counted"  # the prompt is part of the size, or beside it
    sizes: Sizes = "fixed"  # heads keep their sizes, or share the layer's at each eviction
    phase: Counting = "generated"  # tokens that are counted: the answer's, or the text's

    def __post_init__(self) -> None:
        if type(self.interval) is not int or self.interval < 1:
            raise KvfoldError(f"every:interval is at least 1 token, not {self.interval!r}")

    def brings(self) -> Stages:
        return Stages(when=Rounds(self.interval, self.prompt, self.sizes, self.phase))


def in_rounds(method: Method, interval: int | None) -> Method:
    """`method` with eviction after each `interval` generated tokens; None: the method as it is.

    Raises KvfoldError for a bad interval, and IllegalComposition for a method that cannot.
    """
    if interval is None:
        return method
    return parse(with_part(method, Every(interval)))
