# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.methods.base import Encoder, register
from kvfold.store.paired import Pairing


@register(
    "minicache",
    paper="arXiv 2405.14366",
    formula="""
        d = slerp(x[l] / ‖x[l]‖, x[l + 1] / ‖x[l + 1]‖, t),  for keys and for values
        read as ‖x[l]‖·d in layer l and ‖x[l + 1]‖·d in layer l + 1
    """,
)
@dataclass(frozen=True)
class MiniCache(Encoder):
    """Neighbouring layers share one direction per entry; each layer keeps its own magnitudes.

    1. From the share `start` of all layers on, layers are paired: the two directions of an entry
       are replaced by the one at `t` of the way from the first layer's to the second's.
    2. The share `gamma` of the entries, those whose directions differ most, is retained unmerged.
    3. Generated entries are merged `block` at a time.

    Keys and values are merged separately, each KV head with the same head of the other layer. The
    authors published no code: a fixed share instead of a threshold on the angle follows
    Zefan-Cai/KVCache-Factory `minicache.py`, and the blocks are ours. Raises KvfoldError for shares
    outside [0, 1] and blocks below 1.
    Source: Liu et al., section 4.
    """

    t: float = 0.6  # place of the shared direction between the layers, 0 to 1
    gamma: float = 0.05  # share of entries that stay unmerged
    start: float = 0.5  # share of the layers, from the bottom, that are not paired
    block: int = 64  # generated entries that are merged at once

    def encoding(self) -> Pairing:
        return Pairing(t=self.t, gamma=self.gamma, start=self.start, block=self.block)
