# SPDX-License-Identifier: Apache-2.0
"""What caches of 4096 tokens really take: measured on all storages, against limits and formulas."""

from __future__ import annotations

from functools import cache
from math import ceil, floor

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.kernels.views import BLOCK
from kvfold.store.buffer import slack
from kvfold.store.ragged_part import ROOM
from tests.helpers.caches import reachable_bytes
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer

TOKENS, LAYERS, HEADS, SIZE = 4096, 4, 2, 64
KEPT = floor(0.2 * TOKENS)
SEGMENTS = LAYERS * HEADS
INDEX, FLOAT32 = 4, 4
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@cache
def model(dtype: torch.dtype) -> PreTrainedModel:
    return build(
        "llama",
        dtype,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        max_position_embeddings=2 * TOKENS + 256,
    )


@cache
@torch.no_grad()
def filled(spec: str, dtype: torch.dtype) -> tuple[kvfold.CompressedCache, kvfold.Stats]:
    """A cache after 4096 tokens, at 0.2 where it takes a budget, and what it says of itself."""
    ids = prompts((TOKENS,))[0]
    budget = 0.2 if kvfold.parse(spec).takes_budget else None
    cache = kvfold.CompressedCache(model(dtype), spec, budget, tokenizer=word_tokenizer())
    if cache.runs_own_forwards:
        ids = torch.cat([ids, continuation(1, 1)], 1)
        kvfold.generate(model(dtype), ids, cache=cache, max_new_tokens=1, do_sample=False)
        cache.crop(-1)  # what was to be read after the compression
    else:
        model(dtype)(ids, past_key_values=cache, logits_to_keep=1)
    cache.tokenizer = None
    return cache, cache.stats()


def full(width: int) -> int:
    """Bytes of transformers' own cache, for numbers of `width` bytes."""
    return SEGMENTS * TOKENS * 2 * SIZE * width


CASES = [
    ("adakv", torch.bfloat16, 0.22),
    ("adakv", torch.float32, 0.22),
    ("pyramidkv + adakv", torch.bfloat16, 0.22),
    ("kvzip", torch.float32, 0.22),
    ("kivi", torch.bfloat16, 0.34),
    ("kivi:bits=2", torch.bfloat16, 0.22),
    ("kivi", torch.float32, 0.22),
    ("snapkv + kivi:bits=4", torch.bfloat16, 0.09),
    ("adakv + kivi:bits=4", torch.bfloat16, 0.09),
    ("turboquant", torch.bfloat16, 0.30),
    ("turboquant:keys=3,values=2,end_layers=0", torch.float32, 0.12),
    ("snapkv + turboquant", torch.bfloat16, 0.09),
    ("minicache", torch.bfloat16, 0.83),
    ("minicache", torch.float32, 0.83),
    ("think", torch.bfloat16, 0.82),
    ("think", torch.float32, 0.82),
]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("spec", "dtype", "limit"), CASES)
def test_bytes_are_real_and_within_the_limit(spec, dtype, limit):
    cache, stats = filled(spec, dtype)
    assert stats.seen == TOKENS and stats.nbytes_full == full(dtype.itemsize)
    assert stats.nbytes + stats.id_bytes == reachable_bytes(cache)
    assert stats.ratio <= limit
    kept = KEPT if kvfold.parse(spec).takes_budget else TOKENS
    assert sum(n for layer in stats.kept for n in layer[0]) == SEGMENTS * kept


@pytest.mark.parametrize("spec", ["adakv", "pyramidkv + adakv", "kvzip"])
def test_ragged_heads_cost_just_what_they_keep(spec):
    cache, stats = filled(spec, torch.float32)
    counts = [n for layer in stats.kept for n in layer[0]]
    assert max(abs(a - b) for a, b in zip(counts[::2], counts[1::2], strict=True)) > 40
    assert stats.kv_bytes == sum(counts) * 2 * SIZE * FLOAT32
    assert stats.position_bytes == sum(counts) * INDEX
    # Beside the usual room at most a block, where a head's tail is shorter than its neighbour's.
    assert stats.slack_bytes <= SEGMENTS * (BLOCK + ROOM) * 2 * SIZE * FLOAT32
    assert cache.positions(0)[0][0].numel() == counts[0]


def packed(entries: int, bits: int, width: int) -> int:
    """Numbers in `bits`, scale and minimum of each 32, whole ones, and room; a head and layer.

    Keys are packed 128 at a time, and of the values all but the last 128.
    """
    keys, values = entries - entries % 128, entries - 128
    whole = (entries - keys) + (entries - values) + 2 * ROOM
    numbers = (keys + values) * SIZE
    return numbers * bits // 8 + numbers // 32 * 2 * width + whole * SIZE * width


@pytest.mark.cases(2)
@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kivi_costs_its_formula(bits, dtype):
    _, stats = filled(f"kivi:bits={bits}", dtype)
    expected = SEGMENTS * packed(TOKENS, bits, dtype.itemsize)
    assert stats.nbytes == pytest.approx(expected, rel=0.001)
    assert stats.position_bytes == stats.state_bytes == 0


@pytest.mark.slow
def test_kivi_after_eviction_costs_its_formula():
    _, stats = filled("snapkv + kivi:bits=4", torch.bfloat16)
    expected = SEGMENTS * (packed(KEPT, 4, 2) + KEPT * INDEX)
    assert stats.nbytes == pytest.approx(expected, rel=0.001)


def alone(entries: int, keys: int, values: int, width: int) -> int:
    """A length, a scale and a minimum for each but 4 + 32 entries, and room; a head and layer."""
    whole, codes = 36 + ROOM, -(-SIZE * keys // 8) + 2 + -(-SIZE * values // 8) + 4
    return (entries - 36) * codes + whole * 2 * SIZE * width


@pytest.mark.cases(2)
@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize(("keys", "values"), [(2, 2), (3, 4), (4, 3), (4, 4), (8, 4)])
def test_turboquant_costs_its_formula(keys, values, dtype):
    _, stats = filled(f"turboquant:keys={keys},values={values},end_layers=0", dtype)
    assert stats.nbytes == SEGMENTS * alone(TOKENS, keys, values, dtype.itemsize)
    assert stats.position_bytes == stats.state_bytes == 0


@pytest.mark.slow
def test_turboquant_after_eviction_costs_its_formula():
    _, stats = filled("snapkv + turboquant", torch.bfloat16)
    stored = SEGMENTS * (alone(KEPT, 4, 4, 2) + KEPT * INDEX)
    assert stats.nbytes - stats.state_bytes == stored


def pruned(width: int) -> int:
    """40 % of the channels less, rounded down, in all keys but the last 32; the rest is named."""
    left = SIZE - floor(0.4 * SIZE)
    keys = (TOKENS - 32) * left * width + 32 * SIZE * width + left * INDEX
    return SEGMENTS * (keys + TOKENS * SIZE * width + 2 * ROOM * SIZE * width)


@pytest.mark.slow
@DTYPES
def test_think_costs_its_formula(dtype):
    _, stats = filled("think", dtype)
    assert stats.nbytes == pytest.approx(pruned(dtype.itemsize), rel=0.001)


def paired(width: int) -> int:
    """Two layers as they came; of two others one direction an entry, two lengths, and 5 % whole."""
    retained = ceil(0.05 * TOKENS)
    entries = TOKENS * (SIZE * width + 2 * FLOAT32) + retained * (INDEX + 2 * SIZE * width)
    dense = 2 * (TOKENS + slack(TOKENS)) * SIZE * width
    return 2 * HEADS * (entries + dense + 2 * ROOM * SIZE * width)


@DTYPES
def test_minicache_costs_its_formula(dtype):
    _, stats = filled("minicache", dtype)
    assert stats.nbytes == pytest.approx(paired(dtype.itemsize), rel=0.001)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "spec", ["adakv", "kivi", "snapkv + kivi:bits=4", "turboquant", "minicache", "think"]
)
def test_a_long_question_is_given_back(spec):
    """300 tokens are read and taken back: the room that was made for them goes too."""
    cache, before = filled(spec, torch.float32)
    with cache.frozen(), torch.no_grad():
        for piece in continuation(1, 300, seed=4).split(100, 1):
            model(torch.float32)(piece, past_key_values=cache)
        assert cache.stats().nbytes > before.nbytes
        cache.crop(-300)
    assert cache.stats() == before
    assert before.nbytes + before.id_bytes == reachable_bytes(cache)


@pytest.mark.slow
@pytest.mark.cases(1)
@torch.no_grad()
@DTYPES
@pytest.mark.parametrize(
    "spec",
    [
        "snapkv + kivi:bits=4",
        "adakv + kivi:bits=2",
        "snapkv + turboquant",
        "adakv + turboquant_k8v4",
        "snapkv",
        "adakv",
    ],
)
def test_a_budget_in_bytes_is_kept_and_used(spec, dtype):
    """A third of the full cache: packed entries, of which more fit, fill it as well."""
    amount = full(torch.finfo(dtype).bits // 8) // 3
    cache = kvfold.CompressedCache(model(dtype), spec, f"{amount}B")
    model(dtype)(prompts((TOKENS,))[0], past_key_values=cache, logits_to_keep=1)
    stats = cache.stats()
    used = (stats.kv_bytes + stats.position_bytes) / amount
    everything = stats.kept_fraction > 0.999
    assert used <= 1.0 and (everything or used > 0.9)
