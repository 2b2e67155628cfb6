# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Method, Stages, register
from kvfold.store.quantized import Packing


@register("kivi", paper="arXiv 2402.02750")
@dataclass(frozen=True)
class KIVI(Method):
    """Packs keys per channel and values per token into 2, 4 or 8 bits; recent tokens stay whole.

    1. `group` consecutive tokens of a key channel, or channels of a value, share scale and minimum.
    2. Keys are packed `residual` tokens at a time, so 0 to `residual` − 1 of the newest are whole.
    3. Values are packed once `residual` newer ones follow, while decoding in lots of 32: up to 31
       more than the authors' are then whole, and counted as such in the bytes.

    `key_bits` and `value_bits` 0 mean `bits`. The authors recommend 2 bits for models whose heads
    do not share keys, 4 for grouped ones; a constant group, which their code divides by zero, is
    code 0 here, and scales are computed in float32.
    Source: Liu et al., section 3; jy-yuan/KIVI `quant/new_pack.py`, `models/llama_kivi.py`.
    """

    bits: int = 4
    group: int = 32
    residual: int = 128
    key_bits: int = 0
    value_bits: int = 0
    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._packing()

    def stages(self) -> Stages:
        return Stages(encode=self._packing())

    def _packing(self) -> Packing:
        return Packing(
            key_bits=self.key_bits or self.bits,
            value_bits=self.value_bits or self.bits,
            group=self.group,
            residual=self.residual,
        )
