# SPDX-License-Identifier: Apache-2.0
"""On-policy references beside forwards of the model itself over the finished cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold import CompressedCache, IllegalComposition, KvfoldError, UnsupportedModel, parse
from kvfold.contexts.context import compress_each
from kvfold.generation.reading import read_on
from kvfold.hf.decoder_layers import DecoderLayers
from kvfold.observers.references import ReferencesNeed
from tests.helpers.caches import positions
from tests.helpers.contexts import assert_same
from tests.helpers.models import build
from tests.helpers.refits import attention_outputs, fits, reference_outputs
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import stock_cache

SPEC = "kvzip:chunk=40 + match:on_policy=true"
DOCUMENT = "the sky is blue and the grass is green but the house of the king was old " * 6


def model_of(name: str = "llama") -> Any:
    return build(name, torch.float64, vocab_size=12)


def ids_of(*documents: str) -> tuple[Tensor, Tensor]:
    """Rows, padded at the left, and their mask."""
    rows = [word_tokenizer()(document, return_tensors="pt").input_ids for document in documents]
    longest = max(row.shape[1] for row in rows)
    ids, mask = (
        torch.cat([F.pad(row, (longest - row.shape[1], 0)) for row in each])
        for each in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


@contextmanager
def read_ids(model: Any) -> Iterator[list[Tensor]]:
    """Ids of every forward."""
    found: list[Tensor] = []

    def note(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(options["input_ids"])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def compressed(model: Any, spec: str, ids: Tensor, mask: Tensor | None) -> CompressedCache:
    cache = CompressedCache(model, spec, 30, tokenizer=word_tokenizer())
    with torch.no_grad(), cache.reading():
        read_on(model, cache, ids, mask, 1000)
    return cache


def outputs_on_policy(
    model: Any, cache: CompressedCache, whole: DynamicCache, new: Tensor, layer: int
) -> Tensor:
    """Attention outputs `[1, S, Hq, Dv]` of a layer over its full entries.

    Its input is that of the model's own forward over `cache`, whose layers are all refitted.
    """
    block, found = model.model.layers[layer], []
    handle = block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    seen, count = whole.get_seq_length(), new.shape[1]
    with torch.no_grad(), cache.frozen():
        model(new, past_key_values=cache)
        cache.crop(-count)
    handle.remove()
    at = torch.arange(seen, seen + count)[None]
    least = torch.finfo(torch.float64).min
    hidden = torch.full((count, seen + count), least, dtype=torch.float64)
    with torch.no_grad(), attention_outputs(model, layer) as outputs:
        block.self_attn(
            hidden_states=block.input_layernorm(found[0]),
            position_embeddings=model.model.rotary_emb(found[0], at),
            attention_mask=hidden.triu(seen + 1)[None, None],
            past_key_values=copy.deepcopy(whole),
        )
    return outputs[0]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_references_follow_the_refitted_layers_below(name, monkeypatch):
    model, (ids, _) = model_of(name), ids_of(DOCUMENT)
    with fits(monkeypatch) as found, read_ids(model) as forwards:
        cache = compressed(model, SPEC, ids, None)
    prompt = next(i for i, each in enumerate(forwards) if torch.equal(each, ids))
    repetitions = forwards[prompt + 1 :]
    assert len(repetitions) == -(-ids.shape[1] // 40)
    whole = stock_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=whole)
    for layer, (given, _) in enumerate(found):
        expected = [outputs_on_policy(model, cache, whole, new, layer) for new in repetitions]
        torch.testing.assert_close(
            reference_outputs(given), torch.cat(expected, 1), rtol=1e-5, atol=1e-6
        )


def test_the_first_layer_and_the_kept_entries_are_those_of_plain_match():
    model, (ids, _) = model_of(), ids_of(DOCUMENT)
    plain, made = (
        compressed(model, spec, ids, None) for spec in (SPEC.replace(":on_policy=true", ""), SPEC)
    )
    assert positions(made) == positions(plain)
    assert made.get_seq_length() == ids.shape[1]
    pairs = [
        (own.stored().dense()[1], other.stored().dense()[1])
        for own, other in zip(made.states, plain.states, strict=True)
    ]
    assert torch.allclose(*pairs[0], rtol=1e-9)
    assert not any(torch.allclose(*pair, rtol=1e-3) for pair in pairs[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [SPEC, SPEC.replace("kvzip:", "kvzip:level=uniform,"), "kvzip:chunk=40 + match"]
)
def test_a_padded_row_is_fitted_as_alone(spec):
    model, documents = model_of(), (DOCUMENT, "the king was old and the grass is green " * 8)
    together = compressed(model, spec, *ids_of(*documents))
    for row, document in enumerate(documents):
        alone = compressed(model, spec, *ids_of(document))
        for own, other in zip(alone.states, together.states, strict=True):
            assert own.seen <= other.seen
            mine, theirs = own.columns()[0] >= 0, other.columns()[row] >= 0
            for a, b in zip(own.stored().dense(), other.stored().dense(), strict=True):
                torch.testing.assert_close(a[0][mine], b[row][theirs], rtol=1e-4, atol=1e-4)
            biases = own.stored().bias[0][mine], other.stored().bias[row][theirs]
            torch.testing.assert_close(*biases, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_copies_of_one_reading_are_fitted_each_by_its_own_layers():
    model, tokenizer = model_of(), word_tokenizer()
    budgets = [20, 40]
    each = list(compress_each(model, tokenizer, DOCUMENT, SPEC, budgets))
    for budget, context in zip(budgets, each, strict=True):
        own = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, budget)
        assert_same(context.cache, own.cache)
        assert context.cache.phase.before_refit is None


@pytest.mark.parametrize("spec", [SPEC, "kvzip + match", "snapkv:window=8 + match"])
@pytest.mark.parametrize("other", ["kivi:group=8,residual=8", "level"])
def test_all_layers_are_refitted_beside_other_stages(spec, other):
    model, (ids, _) = model_of(), ids_of(DOCUMENT)
    cache = compressed(model, f"{spec} + {other}", ids, None)
    assert all("refit" in state.reports for state in cache.states)
    assert not any(state.observers[ReferencesNeed].nbytes() for state in cache.states)
    with torch.no_grad():
        assert bool(model(ids[:, :5], past_key_values=cache).logits.isfinite().all())


def test_a_level_context_is_refitted():
    model, tokenizer = model_of(), word_tokenizer()
    level = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip + match", 30).levelled()
    assert all("refit" in state.reports for state in level.cache.states)


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_between_layers_leaves_nothing_behind(at, monkeypatch):
    model, (ids, _) = model_of(), ids_of(DOCUMENT)
    cache = CompressedCache(model, SPEC, 30, tokenizer=word_tokenizer())
    run = DecoderLayers.run

    def failing(self: DecoderLayers, index: int, *given: Any) -> Tensor:
        out = run(self, index, *given)
        if index == at and given[-1] is cache:
            raise RuntimeError("no memory")
        return out

    monkeypatch.setattr(DecoderLayers, "run", failing)
    with pytest.raises(RuntimeError, match="no memory"), torch.no_grad(), cache.reading():
        read_on(model, cache, ids, None, 1000)
    phase = cache.phase
    assert (phase.before_refit, phase.repeating) == (None, None)
    assert not phase.frozen and not phase.reading
    assert {layer.get_seq_length() for layer in cache.compressed_layers} == {ids.shape[1]}


@pytest.mark.parametrize(
    "other", ["snapkv:window=8", "keydiff", "kvzip:level=head,head_scores=some.safetensors"]
)
def test_methods_without_a_repetition_are_refused(other):
    with pytest.raises(IllegalComposition, match="compose match:on_policy=true with kvzip"):
        parse(f"{other} + match:on_policy=true").stages()


def test_references_of_the_text_are_refused():
    with pytest.raises(KvfoldError, match="leave references=text out"):
        parse("kvzip + match:on_policy=true,references=text")


def test_models_whose_layers_do_not_run_one_by_one_are_refused(monkeypatch):
    model, (ids, _) = model_of(), ids_of(DOCUMENT)
    run = DecoderLayers.run
    monkeypatch.setattr(DecoderLayers, "run", lambda *given: run(*given) + 1)
    cache = CompressedCache(model, SPEC, 30, tokenizer=word_tokenizer())
    with pytest.raises(UnsupportedModel, match="not refitted"), cache.reading():
        read_on(model, cache, ids, None, 1000)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_models_of_other_layers_are_refused_before_they_read(name):
    with pytest.raises(UnsupportedModel, match="leave on_policy out"):
        CompressedCache(build(name), SPEC, 30, tokenizer=word_tokenizer())
