# SPDX-License-Identifier: Apache-2.0
"""Every method without a fitted file, on a GPU: entries kept, logits and bytes are a CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.bundled import bundled_model
from tests.helpers.budgets import NAMED, compressed, encodes
from tests.helpers.caches import BATCHES, positions
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.turns import two_padded_turns

NEW = 6
# On these prompts the last bit of a weight decides which entry they keep.
UNSTEADY = ("cur", "leverage")
# Dense, ragged, merged and held entries; quantized ones of both kinds.
KINDS = [
    "full",
    "snapkv:window=8",
    "adakv:window=8",
    "kvzip",
    "h2o",
    "d2o",
    "snapkv:window=8 + kivi:group=8,residual=8",
    "adakv:window=8 + turboquant:residual=8,sinks=2",
]


def generated(model: Any, spec: str, lengths: tuple[int, ...], **options: Any) -> Any:
    """Two turns, greedily: their logits `[2·NEW, B, V]` on the CPU, and the cache."""
    cache = compressed(model, spec, tokenizer=word_tokenizer())
    logits = two_padded_turns(model, cache, lengths, max_new_tokens=NEW, **options)
    return logits.float(), cache


def sizes(cache: kvfold.CompressedCache) -> tuple[Any, ...]:
    stats = cache.stats()
    return stats.kept, stats.kv_bytes, stats.position_bytes, stats.state_bytes, stats.seen_per_row


@BATCHES
@pytest.mark.parametrize("spec", NAMED)
def test_a_method_keeps_and_answers_as_on_a_cpu(on_cpu, on_gpu, spec, lengths):
    (expected, there), (logits, here) = (
        generated(model, spec, lengths) for model in (on_cpu, on_gpu)
    )
    assert sizes(here) == sizes(there)
    if spec.partition(":")[0] in UNSTEADY:
        return
    assert positions(here) == positions(there)
    # A number between two codes may round to either.
    tolerance = 0.05 if encodes(spec) else 2e-3
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=1e-3)


@torch.no_grad()
def continued(model: Any, spec: str, lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """Logits `[NEW, B, V]` of the same next tokens after a prompt, and the cache."""
    ids, mask = (each.to(model.device) for each in prompts(lengths))
    cache = compressed(model, spec, tokenizer=word_tokenizer())
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, **options)
    found = []
    for token in continuation(len(ids), NEW).to(model.device).split(1, 1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        places = (mask.cumsum(-1) - 1)[:, -1:]
        inputs = {"attention_mask": mask, "position_ids": places}
        logits = model(token, past_key_values=cache, **inputs).logits
        found.append(logits[:, -1].float().cpu())
    return torch.stack(found), cache


@BATCHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("spec", NAMED)
def test_half_precision_is_near_float32(on_gpu, spec, dtype, lengths):
    """Rounded scores keep other entries; logits of other tokens are √2 of the norm away."""
    exact, there = continued(on_gpu, spec, lengths)
    half = build("llama", dtype).to("cuda")
    logits, here = continued(half, spec, lengths)
    assert logits.isfinite().all()
    assert here.stats().seen_per_row == there.stats().seen_per_row
    assert (logits - exact).norm() < 1.1 * exact.norm()


@pytest.mark.parametrize("spec", KINDS)
def test_compiled_decoding_is_eager_decoding(on_gpu, spec):
    """transformers' default: CUDA graphs."""
    expected, there = generated(on_gpu, spec, (64,))
    logits, here = generated(on_gpu, spec, (64,), compile=True)
    assert positions(here) == positions(there)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("spec", KINDS)
def test_captured_decoding_is_eager_decoding(on_gpu, spec):
    expected, there = generated(on_gpu, spec, (64,))
    logits, here = generated(on_gpu, spec, (64,), capture=True)
    assert positions(here) == positions(there)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["snapkv", "adakv", "kvzip", "kvzip + kivi:bits=4"])
def test_a_context_of_a_gpu_answers_on_a_cpu(method, tmp_path):
    file = tmp_path / "context.safetensors"
    model, tokenizer = bundled_model()
    document = " ".join(f"The magic number of item {i} is {7919 * i}." for i in range(1, 30))
    question = "What is the magic number of item 12?"
    there = kvfold.compress(model.to("cuda"), tokenizer, document, method, 0.5)
    there.save(file)
    expected = there.ask(question, max_new_tokens=8)
    here = kvfold.load(file, bundled_model()[0], tokenizer)
    assert here.ask(question, max_new_tokens=8) == expected
