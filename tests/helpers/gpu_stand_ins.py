# SPDX-License-Identifier: Apache-2.0
"""What torch's kernels for GPUs return, computed on a CPU."""

from itertools import pairwise

import torch

from kvfold.kernels import dispatch


def varlen_stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, enable_gqa
):
    """As torch's kernel behaves: log-sum-exps `[Hq, T_q]`, +inf where there is nothing."""
    assert return_aux.lse and enable_gqa and key.dim() == value.dim() == query.dim() == 3
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    lse = torch.full(query.shape[1::-1], torch.inf)
    for i, (start, end) in enumerate(pairwise(cu_seq_k)):
        for at in range(cu_seq_q[i], cu_seq_q[i + 1]):
            for head in range(query.shape[1]):
                keys, values = (
                    x[start:end, head * x.shape[1] // query.shape[1]] for x in (key, value)
                )
                if end > start:
                    logits = keys.float() @ query[at, head].float() * scale
                    out[at, head] = logits.softmax(0).to(out.dtype) @ values
                    lse[head, at] = logits.logsumexp(0)
    return out, lse


def flash_stand_in(query, key, value, dropout, is_causal, *, scale):
    """As torch's kernel behaves: half precision in, float32 log-sum-exps out, and much else."""
    assert query.dtype == key.dtype == value.dtype and query.dtype in dispatch.HALF
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert dropout == 0.0 and (not is_causal or query.shape[2] == key.shape[2])
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    logits = query.float() @ keys.mT * scale
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -torch.inf)
    return (logits.softmax(-1) @ values).to(query.dtype), logits.logsumexp(-1), None, None
