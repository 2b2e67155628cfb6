# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.methods.base import Encoder, register
from kvfold.store.per_token import Quantizing

END_LAYERS = 2  # at each end, for 3 bits and fewer


@register(
    "turboquant",
    paper="arXiv 2504.19874",
    formula="""
        key read as ‖k‖·Hᵀŷ/‖ŷ‖,  ŷ[j] = the centroid nearest to (H·k/‖k‖)[j],  H Hadamard
        value read as code·scale + min,  code = ⌊(v − min) / scale + ½⌋,
                                         scale = (max − min) / (2^bits − 1)
    """,
    presets={
        "k8v4": {"keys": 8},
        "4bit": {},
        "k3v4": {"keys": 3},
        "3bit": {"keys": 3, "values": 3},
    },
)
@dataclass(frozen=True)
class TurboQuant(Encoder):
    """Quantizes each entry alone: rotated keys by a fixed codebook, values by scale and minimum.

    1. A key's direction is rotated by a Hadamard matrix, so that its channels look Gaussian; each
       becomes a code of the exact Lloyd-Max table of N(0, 1). Its length is kept in float16.
    2. A value has a scale and a minimum of its own, in float16. It is not rotated.
    3. The `sinks` oldest entries of a head and the `residual` newest stay raw; while decoding 32
       are quantized at a time, so that up to 31 more are raw. The bytes in stats include them.

    Encoded entries may be evicted later, in turns or rounds ("snapkv + turboquant + every"), and
    moved by edits. `keys` 8 is FP8 with a scale per key, not rotated. `end_layers` −1 means 2 where
    `keys` or `values` have 3 bits or fewer, else 0. Different from vLLM's: exact centroids (its
    own differ from the fourth digit on), recent entries and sinks stay raw, lengths are stored
    corrected; head sizes of no power of two take a cosine transform beside the Hadamard matrix. The
    paper's sketch of the residual (QJL) is left out, as there.

    Where a head's keys before RoPE share far more than they differ by, as with large biases of
    their projection, the mean is fixed with the first codes and kept exactly, and codes are of what
    is left. That takes 4 more bytes a key, for its position, and decode steps in plain torch. Keys
    that kvfold cannot rotate back are warned of instead. Raises KvfoldError for other bits.
    Source: Zandieh et al., sections 3 and 4; vllm-project/vllm `turboquant` files.
    """

    keys: int = 4  # bits of a key's channel: 2, 3 or 4; 8 is FP8
    values: int = 4  # bits of a value's channel: 2, 3 or 4
    correct: bool = True  # decoded keys have the length of the keys
    end_layers: int = -1  # first and last layers that stay raw; -1: 2 each at 3 bits or fewer
    residual: int = 32  # newest entries that stay raw
    sinks: int = 4  # oldest entries that stay raw

    def encoding(self) -> Quantizing:
        few = END_LAYERS if min(self.keys, self.values) <= 3 else 0
        return Quantizing(
            key_bits=self.keys,
            value_bits=self.values,
            correct=self.correct,
            sinks=self.sinks,
            residual=self.residual,
            end_layers=few if self.end_layers == -1 else self.end_layers,
        )
