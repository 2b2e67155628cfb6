# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.methods.base import Encoder, register
from kvfold.store.quantized import Packing


@register(
    "kivi",
    paper="arXiv 2402.02750",
    formula="""
        code = round((x − min) / scale),  scale = (max − min) / (2^bits − 1),  in each group
        read as code·scale + min
    """,
)
@dataclass(frozen=True)
class KIVI(Encoder):
    """Quantizes keys per channel and values per token to 2, 4 or 8 bits; recent tokens stay raw.

    1. `group` consecutive tokens of a key channel, or channels of a value, share scale and minimum.
    2. Keys are packed in blocks of `residual` tokens, so 0 to `residual` − 1 of the newest are raw.
    3. Values are packed once `residual` newer ones follow; while decoding 32 at a time, so that up
       to 31 more than in the authors' code are raw. The bytes in stats include them.

    `key_bits` and `value_bits` 0 mean `bits`. The authors recommend 2 bits for multi-head models, 4
    for grouped-query ones. A constant group, for which their code divides by zero, is code 0 here,
    and scales are computed in float32. Raises KvfoldError for other bits and for groups that fill
    no 32-bit words.
    Source: Liu et al., section 3; jy-yuan/KIVI `quant/new_pack.py`, `models/llama_kivi.py`.
    """

    bits: int = 4  # bits of a number: 2, 4 or 8
    group: int = 32  # numbers that share scale and minimum
    residual: int = 128  # tokens of a block of keys, and newest values that stay raw
    key_bits: int = 0  # bits of keys; 0: as `bits`
    value_bits: int = 0  # bits of values; 0: as `bits`

    def encoding(self) -> Packing:
        return Packing(
            key_bits=self.key_bits or self.bits,
            value_bits=self.value_bits or self.bits,
            group=self.group,
            residual=self.residual,
        )
