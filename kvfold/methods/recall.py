# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.methods.base import Encoder, Forced, Stages, register
from kvfold.store.recalled import Recalling


@register(
    "recall",
    paper="",
    formula="""
        read by query q = sinks, residual, and the r cold entries of highest  max over heads  q·k̂
        k̂ = the key's code of a few bits,  r = ⌈read · cold entries⌉
    """,
)
@dataclass(frozen=True)
class Recall(Encoder):
    """Keeps every entry, in host memory or a file, and reads few: codes of keys find them.

    1. When a prompt ends, all entries go cold but the `residual` newest of each head. Hot are
       codes of all keys, `keys` bits a channel, and the `sinks` oldest entries.
    2. Each query of each KV head reads the hot entries and, of the cold ones, those whose codes
       give the largest product with any of the group's query heads.
    3. While decoding, entries leave the `residual` 32 at a time.

    "snapkv + recall" keeps the entries that SnapKV chooses hot, and reads of the others: the budget
    is what stays hot. Nothing is lost, so that a later turn or round chooses among all tokens.
    `read` is a share up to 1, or a number of entries. Codes are TurboQuant's; a bias of the keys is
    kept exactly, as there. With `cold` bits, cold entries are TurboQuant's codes as well. Raises
    KvfoldError for other bits, and for a `read` of none.

    Near kin: SparQ (arXiv 2312.04985), Loki (2406.02542), Double Sparsity (2408.07092), ShadowKV
    (2410.21465), RetrievalAttention (2409.10516); pages instead of entries, as Quest's
    (2406.10774), find far less here.
    """

    read: float = 0.05  # cold entries that each KV head reads for each query
    keys: int = 2  # bits of a key's channel
    residual: int = 16  # newest entries that stay hot
    sinks: int = 4  # oldest entries that stay hot
    cold: int = 0  # bits of a cold entry's channel; 0: entries are raw

    def encoding(self) -> Recalling:
        self.check_range(0, None, "sinks")
        return Recalling(bits=self.keys, read=self.read, residual=self.residual, cold=self.cold)

    def stages(self) -> Stages:
        return Stages(encode=self.encoding(), forced=Forced(sinks=self.sinks))

    def brings(self) -> Stages:
        return Stages(encode=self.encoding())
