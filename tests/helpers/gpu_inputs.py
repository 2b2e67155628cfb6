# SPDX-License-Identifier: Apache-2.0
"""Inputs of kernels for GPUs and in C++, and naive attention to them in float64."""

import torch

from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.views import Flat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2


def noise(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_close(got, expected, dtype=torch.float32, tolerance=2e-6):
    tolerance = 2e-2 if dtype == torch.bfloat16 else tolerance
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def bent(logits, softcap):
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def attended(query, keys, values, softcap=None, biases=None):
    """Output `[S, G, Dv]` and log-sum-exp `[S, G]` of a list of segments, in float64.

    `biases`: one number for each entry of a segment, added after the softcap.
    """
    out = query.new_zeros(*query.shape[:2], values[0].shape[1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        if len(key):
            logits = bent(query[i].double() @ key.double().T * SCALE, softcap)
            logits = logits if biases is None else logits + biases[i].double()
            out[i] = logits.softmax(-1) @ value.double()
            lse[i] = logits.logsumexp(-1)
    return out, lse


def segments(lengths, size, seed, dtype):
    return [noise(n, size, seed=seed + i, dtype=dtype) for i, n in enumerate(lengths)]


def starts_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=dtype)


def attention(query, key, softcap=None, visible=None):
    """Softmax rows `[B, Hq, S, T]` in float64, and the log-sum-exps of their logits."""
    queries, stored = query.shape[2], key.shape[2]
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = bent(query.double() @ keys.mT * SCALE, softcap)
    seen = torch.ones(queries, stored, dtype=torch.bool, device=DEVICE).tril(stored - queries)
    if visible is not None:
        seen = seen & visible[:, None, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1).float()


def asked(batch, heads, groups, queries, stored, size=32, dtype=torch.float32):
    """Queries and keys as models hand them out: views of larger buffers, the slack poisoned."""
    query = noise(batch, queries, heads * groups, size, seed=1, dtype=dtype).transpose(1, 2)
    key = noise(batch, heads, stored + 3, size, seed=2, dtype=dtype)
    key[:, :, stored:] = torch.nan
    return query, key[:, :, :stored]


def unpacked(words, bits, dim):
    """One number after the other, the lowest bits of a word first."""
    words = words if dim == 1 else words.T
    codes = [[(word >> shift) & (2**bits - 1) for word in row for shift in range(0, 32, bits)]
             for row in words.tolist()]  # fmt: skip
    codes = torch.tensor(codes, dtype=torch.float64).view(len(words), words.shape[1] * 32 // bits)
    return (codes if dim == 1 else codes.T).to(DEVICE)


def packed(lengths, size, bits, group, keys, dtype, seed):
    """Random words, scales and minima, and the numbers of each segment that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    per_word, of_scales = (32 // bits, group) if keys else (1, 1)
    wide = (size, size) if keys else (size * bits // 32, size // group)
    words = [
        torch.randint(-(2**31), 2**31, (n, wide[0]), generator=generator).int().to(DEVICE)
        for n in [n // per_word for n in lengths]
    ]
    counts = [n // of_scales for n in lengths]
    scale = [
        noise(n, wide[1], seed=seed + i, dtype=dtype).abs() / 2**bits for i, n in enumerate(counts)
    ]
    minimum = [noise(n, wide[1], seed=50 + seed + i, dtype=dtype) for i, n in enumerate(counts)]
    numbers = []
    for of_words, steps, lowest in zip(words, scale, minimum, strict=True):
        codes, along = unpacked(of_words, bits, 0 if keys else 1), 0 if keys else 1
        steps, lowest = (x.double().repeat_interleave(group, along) for x in (steps, lowest))
        numbers.append((codes * steps + lowest).to(dtype))
    kind = PackedKeys if keys else PackedValues
    return kind(Flat.of(words), Flat.of(scale), Flat.of(minimum), bits, group), numbers
