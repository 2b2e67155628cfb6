# SPDX-License-Identifier: Apache-2.0
"""Match: its reference queries beside the model's own attention, and what becomes of a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import kvfold
from kvfold import IllegalComposition, KvfoldError, UnsupportedModel, parse
from kvfold.contexts.context import compress_each
from kvfold.contexts.files.format import opened
from kvfold.kernels.partial_attention import attend_to_part
from kvfold.methods.stages.refit.matching import Matching
from kvfold.serve.vllm.export import check_plain
from tests.helpers.caches import ALONE, BATCHES, PADDED, positions, start
from tests.helpers.contexts import assert_same, new_model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.refits import attention_outputs, fits, reference_outputs
from tests.helpers.scorers import zap_of
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader, stock_cache

SNAPKV = "snapkv:window=8 + match"
DOCUMENT = "the sky is blue and the grass is green but the house of the king was old " * 6


@pytest.mark.parametrize("pieces", [1, 3])
@BATCHES
def test_text_references_are_queries_of_the_text_read_once_more(lengths, pieces, monkeypatch):
    """In the first layer, whose queries depend on nothing before them, all of it is exact."""
    model = build("llama", torch.float64)
    ids, mask = prompts(lengths)
    with attention_outputs(model, 0) as outputs, torch.no_grad():
        for row, length in enumerate(lengths):
            twice = ids[row : row + 1, 64 - length :].repeat(1, 2)
            model(twice, past_key_values=stock_cache(model))
    truth = [out[0, length:] for out, length in zip(outputs, lengths, strict=True)]
    cache = kvfold.CompressedCache(model, SNAPKV, 20)
    with fits(monkeypatch) as found, torch.no_grad():
        reader = Reader(model, cache, mask if len(lengths) > 1 else None)
        with cache.reading(until=64):
            for start_ in range(0, 64, -(-64 // pieces)):
                piece = ids[:, start_ : start_ + -(-64 // pieces)]
                if reader.mask is not None:
                    end = start_ + piece.shape[1]
                    places = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, start_:]
                    model(
                        piece,
                        past_key_values=cache,
                        attention_mask=mask[:, :end],
                        position_ids=places,
                    )
                else:
                    model(piece, past_key_values=cache)
    got = reference_outputs(found[0][0])
    assert got.shape[1] == 64
    for row, (expected, length) in enumerate(zip(truth, lengths, strict=True)):
        torch.testing.assert_close(got[row, 64 - length :], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [2000, 40])
@pytest.mark.parametrize("layer", [0, 3])
def test_repeated_references_are_those_of_the_reconstruction(chunk, layer, monkeypatch):
    model, tokenizer = build("llama", vocab_size=12), word_tokenizer()
    with attention_outputs(model, layer) as outputs, fits(monkeypatch) as found:
        spec = f"kvzip:chunk={chunk} + match"
        context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 30)
    parts = -(-(context.stats().seen - max(context.stats().protected)) // chunk)
    repeated = torch.cat(outputs[-parts:], 1)
    torch.testing.assert_close(reference_outputs(found[layer][0]), repeated, rtol=1e-4, atol=1e-4)


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kvzip", "kvzip:score=rms", "kvzip_plus", "kvzip:chunk=40"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_attention_to_the_text_is_noted_while_it_is_repeated(spec, name, monkeypatch):
    """As it is computed afterwards, with sink logits and softcaps, for all queries or some."""
    model, tokenizer = build(name, torch.float64, vocab_size=12), word_tokenizer()
    for queries in (2048, 64):
        with fits(monkeypatch) as found:
            kvfold.compress(model, tokenizer, DOCUMENT, f"{spec} + match:queries={queries}", 30)
        for given, _ in found:
            noted, real = given.references, given.references.real[:, None]
            assert noted.block is not None
            expected = attend_to_part(
                noted.queries,
                given.keys,
                given.values,
                columns=(~given.block).long(),
                until=torch.zeros_like(noted.real, dtype=torch.long)[:, None],
                scale=given.scale,
                softcap=given.softcap,
            )
            for got, truth in zip(noted.block, expected, strict=True):
                torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)
            assert bool(real.all())


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["entry", "head"])
def test_what_was_noted_fits_as_what_is_computed(bias, monkeypatch):
    model, tokenizer = build("llama", torch.float64, vocab_size=12), word_tokenizer()
    with fits(monkeypatch) as found:
        kvfold.compress(model, tokenizer, DOCUMENT, f"kvzip + match:bias={bias}", 30)
    for given, made in found:
        again = Matching("whole", bias, True, 1e-3 if bias == "entry" else 1e-2, 1e-3, 0.5)(
            replace(given, references=replace(given.references, block=None))
        )
        torch.testing.assert_close(made.values, again.values, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(made.bias, again.bias, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(made.report, again.report, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("spec", ["kvzip", "kvzip:chunk=20"])
def test_a_text_that_receives_little_attention_is_fitted_right(spec, monkeypatch):
    """Queries count alike with target=block, also where the text's share is far below rounding."""
    model, tokenizer = build("llama", vocab_size=12), word_tokenizer()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(6)
    for target in ("block", "whole"):
        with fits(monkeypatch) as found:
            kvfold.compress(model, tokenizer, DOCUMENT, f"{spec} + match:target={target}", 30)
        for given, made in found:
            assert target == "whole" or given.references.block is None
            again = Matching(target, "entry", True, 1e-3, 1e-3, 0.5)(
                replace(given, references=replace(given.references, block=None))
            )
            torch.testing.assert_close(made.report, again.report, rtol=1e-2, atol=1e-3)


def test_without_queries_that_judge_no_error_is_reported(tmp_path):
    model, tokenizer = build("llama", vocab_size=12), word_tokenizer()
    (tmp_path / "asked.txt").write_text("red\n")
    spec = f"kvzip:questions={tmp_path / 'asked.txt'} + match"
    refits = kvfold.compress(model, tokenizer, DOCUMENT, spec, 30).stats().refits
    assert bool(torch.tensor(refits).isfinite().all())


def test_references_are_limited(monkeypatch):
    model, tokenizer = build("llama", vocab_size=12), word_tokenizer()
    for spec in ("kvzip + match:queries=64", "kvzip + match:queries=64,references=text"):
        with fits(monkeypatch) as found:
            kvfold.compress(model, tokenizer, DOCUMENT, spec, 30)
        assert all(32 < given.references.queries.shape[2] <= 96 for given, _ in found)


@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", "adakv:window=8", "tova"])
def test_the_same_entries_are_kept_with_other_values_and_a_bias(spec, lengths):
    model = build("llama", torch.float64)
    plain, made = (start(model, each, lengths).cache for each in (spec, f"{spec} + match"))
    assert positions(made) == positions(plain)
    for own, other in zip(made.states, plain.states, strict=True):
        real = own.columns() >= 0
        (keys, values), (as_read, before) = own.stored().dense(), other.stored().dense()
        assert torch.equal(keys[real], as_read[real])
        assert not torch.equal(values[real], before[real])
        assert bool(own.stored().bias.any()) and other.stored().bias is None
    assert all(len(layer) == 4 and layer[1] < layer[0] for layer in made.stats().refits)
    assert "refitted: error of held-out outputs" in str(made.stats())


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kvzip_plus", "kvzip:score=rms,floor=0.25", "zap"])
def test_a_pool_of_all_heads_is_refitted(spec, tmp_path):
    """The same entries stay, and the report's error is lower in all layers together."""
    model, tokenizer = new_model(), word_tokenizer()
    spec = zap_of(model, tmp_path) if spec == "zap" else spec
    plain, made = (
        kvfold.compress(model, tokenizer, DOCUMENT, each, 30).cache
        for each in (spec, f"{spec} + match")
    )
    assert positions(made) == positions(plain)
    for own, other in zip(made.states, plain.states, strict=True):
        real = own.columns() >= 0
        (keys, values), (as_read, before) = own.stored().dense(), other.stored().dense()
        assert torch.equal(keys[real], as_read[real])
        assert not torch.equal(values[real], before[real])
        assert bool(own.stored().bias[real].any())
    refits = torch.tensor(made.stats().refits)
    assert float(refits[:, 1].mean()) < float(refits[:, 0].mean())


@pytest.mark.parametrize("spec", ["snapkv:window=8", "kvzip"])
def test_without_biases_and_values_it_is_plain_eviction(spec):
    model, tokenizer = new_model(), word_tokenizer()
    off = f"{spec} + match:bias=none,values=kept"
    plain, made = (
        kvfold.compress(model, tokenizer, DOCUMENT, each, 30).cache for each in (spec, off)
    )
    for own, other in zip(made.states, plain.states, strict=True):
        assert own.stored().bias is None
        for a, b in zip(own.stored().dense(), other.stored().dense(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("spec", [SNAPKV, "adakv:window=8 + match"])
def test_a_padded_row_is_fitted_as_alone(spec):
    model = build("llama", torch.float64)
    together = start(model, spec, PADDED).cache
    ids, _ = prompts(PADDED)
    for row, length in enumerate(PADDED):
        alone = Reader(model, kvfold.CompressedCache(model, spec, 20))
        alone(ids[row : row + 1, 64 - length :])
        for own, other in zip(alone.cache.states, together.states, strict=True):
            mine, theirs = own.columns()[0] >= 0, other.columns()[row] >= 0
            for a, b in zip(own.stored().dense(), other.stored().dense(), strict=True):
                torch.testing.assert_close(a[0][mine], b[row][theirs], rtol=1e-4, atol=1e-4)
            biases = own.stored().bias[0][mine], other.stored().bias[row][theirs]
            torch.testing.assert_close(*biases, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:window=8 + match:queries=64",
        "kvzip:chunk=30 + match:queries=64",
        "kvzip + match:queries=64,target=block",
        "kvzip + match:queries=64,on_policy=true",
        "kvzip + match:queries=64,references=text",
    ],
)
def test_a_short_row_is_fitted_to_its_own_share_of_references(spec):
    """Of long rows few tokens are references; that thins those of short rows no further."""
    model, tokenizer = new_model().double(), word_tokenizer()
    lengths, (ids, mask) = (40, 320), prompts((40, 320))
    ids = ids % model.config.vocab_size
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits(of_row: Tensor, seen: Tensor) -> Tensor:
        cache = kvfold.CompressedCache(model, spec, 0.3, tokenizer=tokenizer)
        out = kvfold.generate(
            model, of_row, attention_mask=seen, cache=cache, max_new_tokens=4, min_new_tokens=4,
            **options,
        )  # fmt: skip
        return torch.stack(out.logits, 1)

    together = logits(ids, mask)
    for row, length in enumerate(lengths):
        alone = logits(ids[row : row + 1, -length:], mask[row : row + 1, -length:])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SNAPKV, "adakv:window=8 + match"])
def test_a_later_turn_is_fitted_on_top(spec):
    reader = start(build("llama", torch.float64), spec)
    before = [state.stored().bias.clone() for state in reader.cache.states]
    reader(continuation(1, 30))
    for state, old in zip(reader.cache.states, before, strict=True):
        now = state.stored().bias
        assert now.shape != old.shape or not torch.equal(now, old)
    assert all(layer[1] < layer[0] for layer in reader.cache.stats().refits)


def test_contexts_are_saved_and_made_for_several_budgets(tmp_path):
    model, tokenizer = new_model(), word_tokenizer()
    budgets = [20, 40]
    for spec in ("kvzip + match", SNAPKV):
        each = list(compress_each(model, tokenizer, DOCUMENT, spec, budgets))
        for budget, context in zip(budgets, each, strict=True):
            own = kvfold.compress(model, tokenizer, DOCUMENT, spec, budget)
            assert_same(context.cache, own.cache)
        each[0].save(tmp_path / "a.kvfold")
        loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
        assert_same(loaded.cache, each[0].cache)
        assert loaded.stats().refits == each[0].stats().refits


def test_only_contexts_without_biases_go_into_vllm(tmp_path):
    model, tokenizer = new_model(), word_tokenizer()
    for options, version in (
        ("bias=none,target=block", "1"),
        ("bias=head", "2"),
        ("bias=entry", "2"),
    ):
        context = kvfold.compress(model, tokenizer, DOCUMENT, f"{SNAPKV}:{options}", 20)
        context.save(tmp_path / "a.kvfold")
        with safe_open(tmp_path / "a.kvfold", "pt") as file:
            assert file.metadata()["kvfold_context"] == version
        with opened(tmp_path / "a.kvfold") as file:
            if options.startswith("bias=none"):
                check_plain(file)
                continue
            with pytest.raises(KvfoldError, match="compress the document with match:bias=none"):
                check_plain(file)


def test_biases_count_in_a_budget_of_bytes():
    model = build("llama")
    ids, _ = prompts(ALONE)
    held = {}
    for spec in ("snapkv:window=8", SNAPKV, "snapkv:window=8 + match:bias=none,target=block"):
        cache = kvfold.CompressedCache(model, spec, "24KB")
        Reader(model, cache)(ids)
        held[spec] = cache.stats()
        assert held[spec].kv_bytes + held[spec].position_bytes <= 24_000
    counts = [held[spec].mean_kept for spec in held]
    assert counts[1] < counts[0] == counts[2]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("match", "evicts nothing itself"),
        ("full + match", "evicts nothing itself"),
        ("kivi + match", "evicts nothing itself"),
        ("d2o + match", "merging changes them"),
        ("snapkv + merge + match", "merging changes them"),
        ("streaming_llm + match", "fits entries to queries at their positions"),
        ("snapkv + reindex + match", "fits entries to queries at their positions"),
    ],
)
def test_what_cannot_be_refitted_is_refused(spec, reason):
    with pytest.raises(IllegalComposition, match=reason):
        parse(spec).stages()


@pytest.mark.parametrize("options", ["queries=10", "ridge=-1", "hold=-0.1", "up_to=-1"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError, match=rf"match:{options.partition('=')[0]} is .*, not "):
        parse(f"snapkv + match:{options}")


def test_values_without_biases_are_fitted_to_the_block_only():
    with pytest.raises(KvfoldError, match="choose target=block"):
        parse("snapkv + match:bias=none")


@pytest.mark.parametrize("name", ["gemma3n", "deepseek_v3"])
def test_entries_of_several_layers_and_latents_are_refused(name):
    with pytest.raises(UnsupportedModel, match="leave match out"):
        kvfold.CompressedCache(build(name), SNAPKV, 20)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma2", "gpt_oss", "gemma3"])
def test_families_are_refitted(name):
    reader = start(build(name), SNAPKV)
    assert all(layer[1] < layer[0] for layer in reader.cache.stats().refits)
    assert bool(reader(continuation(1, 5)).isfinite().all())


def test_encoded_entries_keep_their_bias():
    reader = start(build("llama"), f"{SNAPKV} + kivi:group=8,residual=8")
    assert all(bool(state.stored().bias.any()) for state in reader.cache.states)
    assert bool(reader(continuation(1, 30)).isfinite().all())


@pytest.mark.slow
def test_a_refitted_cache_is_closer_to_the_full_one():
    model, tokenizer = kvfold.bundled_model()
    text = "Once upon a time there was a little girl who lived in an old house. " * 12
    ids = tokenizer("She was very happy and went to the garden.", return_tensors="pt").input_ids
    found = {}
    for spec, budget in (("full", None), ("kvzip", 0.1), ("kvzip + match", 0.1)):
        cache = kvfold.compress(model, tokenizer, text, spec, budget).cache
        with torch.no_grad():
            found[spec] = model(ids, past_key_values=cache).logits.log_softmax(-1)
    full = found.pop("full")
    kl = {spec: float((full.exp() * (full - own)).sum(-1).mean()) for spec, own in found.items()}
    assert kl["kvzip + match"] < 0.8 * kl["kvzip"]
