# SPDX-License-Identifier: Apache-2.0
"""Inputs of kernels for GPUs, and naive attention to them in float64."""

import torch

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


def attended(query, keys, values, softcap=None):
    """Output `[S, G, Dv]` and log-sum-exp `[S, G]` of a list of segments, in float64."""
    out = query.new_zeros(*query.shape[:2], values[0].shape[1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        if len(key):
            logits = bent(query[i].double() @ key.double().T * SCALE, softcap)
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
