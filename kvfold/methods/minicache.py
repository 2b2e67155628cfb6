# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Method, Stages, register
from kvfold.store.paired import Pairing


@register("minicache", paper="arXiv 2405.14366")
@dataclass(frozen=True)
class MiniCache(Method):
    """Neighbouring layers share one direction an entry, and each keeps its own lengths.

    1. From the share `start` of the layers on, two at a time are merged: an entry's two directions
       become the one `t` of the way from the first layer's to the second's.
    2. The share `gamma` of the entries whose directions differ most stays as it came.
    3. Generated entries are merged `block` at a time.

    Keys and values are merged apart, each KV head with the same one of the other layer. The authors
    published no code: a fixed share instead of a threshold on the angle follows
    Zefan-Cai/KVCache-Factory `minicache.py`, and the blocks are ours.
    Source: Liu et al., section 4.
    """

    t: float = 0.6
    gamma: float = 0.05
    start: float = 0.5
    block: int = 64
    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._pairing()

    def stages(self) -> Stages:
        return Stages(encode=self._pairing())

    def _pairing(self) -> Pairing:
        return Pairing(t=self.t, gamma=self.gamma, start=self.start, block=self.block)
