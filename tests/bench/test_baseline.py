# SPDX-License-Identifier: Apache-2.0
"""The baseline and its twin give the model's own logits, and share nothing but weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvfold
from kvfold.bench.baseline import full_cache, full_twin, twin
from kvfold.bench.sdpa_variants import SdpaChoice, SdpaVariant
from tests.helpers.models import build, continuation


@pytest.mark.parametrize("decode", ["packed", "grouped"])
@pytest.mark.parametrize("prefill", ["repeated", "grouped"])
def test_the_baseline_gives_the_model_s_own_logits(prefill: Any, decode: Any) -> None:
    model = build("llama")
    eager = build("llama")
    eager.set_attn_implementation("eager")
    fast = full_twin(model, SdpaChoice(SdpaVariant(prefill), SdpaVariant(decode)))
    cache = full_cache(fast, room=6)
    ids = continuation(2, 40)
    # The prompt, one token, three at once (which need a mask), and one more.
    for start, stop in ((0, 33), (33, 34), (34, 37), (37, 38)):
        out = fast(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        expected = eager(input_ids=ids[:, :stop]).logits[:, start:]
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=2e-5)
    assert model.config._attn_implementation == "sdpa"


def test_the_baseline_packs_query_heads_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[tuple[int, ...], ...]] = []
    own = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert not options.get("enable_gqa")
        shapes.append((tuple(query.shape), tuple(key.shape)))
        return own(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model = full_twin(build("llama"), SdpaChoice(SdpaVariant("repeated"), SdpaVariant("packed")))
    cache = full_cache(model, room=2)
    model(input_ids=continuation(3, 20), past_key_values=cache, use_cache=True)
    shapes.clear()
    model(input_ids=continuation(3, 1), past_key_values=cache, use_cache=True)
    # 8 query heads over 2 KV heads of 8: four rows attend to each KV head's keys, uncopied.
    assert shapes == [((3, 2, 4, 8), (3, 2, 21, 8))] * 4


def test_the_full_cache_has_room_for_the_tokens_that_come() -> None:
    model = full_twin(build("llama"), SdpaChoice())
    cache = full_cache(model, room=5)
    model(input_ids=continuation(1, 20), past_key_values=cache, use_cache=True)
    before = [layer.grown[0].rows.data_ptr() for layer in cache.layers]
    for _ in range(5):
        model(input_ids=continuation(1, 1), past_key_values=cache, use_cache=True)
    assert [layer.grown[0].rows.data_ptr() for layer in cache.layers] == before
    # 25 tokens, 2 heads of 8 numbers, keys and values, 4 bytes.
    assert [layer.nbytes() for layer in cache.layers] == [25 * 2 * 8 * 2 * 4] * 4


def test_a_twin_shares_weights_and_nothing_else() -> None:
    model = build("llama")
    kvfold.enable(model)
    other = twin(model)
    for own, shared in zip(model.parameters(), other.parameters(), strict=True):
        assert own is shared
    assert other.config is not model.config
    assert model.config._attn_implementation == "kvfold"
    assert other.config._attn_implementation == "sdpa"
