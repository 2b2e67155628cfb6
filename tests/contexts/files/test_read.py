# SPDX-License-Identifier: Apache-2.0
"""Context files: what comes back, what is refused, and what a crash leaves behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import kvfold
from kvfold.contexts.files.format import opened, read_header
from kvfold.fitted.fits import digests_of
from tests.helpers.contexts import (
    DOCUMENT,
    KINDS,
    KIVI,
    QUESTION,
    TURBO,
    assert_same,
    compressed,
    contents,
    forged,
    new_model,
    rewritten,
)
from tests.helpers.scorers import zap_of

EVERY = pytest.mark.parametrize("spec", KINDS)


def next_turns(context: kvfold.Context) -> list[Tensor]:
    """Logits of a turn that compresses again, and of steps after it."""
    cache, model = context.cache, context.model
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 12, (1, 50), generator=generator)
    out = []
    with torch.no_grad():
        for piece in (ids[:, :44], *ids[:, 44:].split(1, 1)):
            out.append(model(piece, past_key_values=cache, use_cache=True).logits)
    return out


def read_on(context: kvfold.Context) -> kvfold.Context:
    """The context of all that its cache has read."""
    unknown = torch.zeros(1, context.cache.get_seq_length(), dtype=torch.long)
    return dataclasses.replace(context, ids=unknown)


@pytest.mark.slow
@pytest.mark.cases(1)
@EVERY
def test_what_is_saved_comes_back_and_goes_on(model, tokenizer, tmp_path, spec):
    context = compressed(model, tokenizer, spec, protect=[(7, 9)] if spec == "snapkv" else ())
    assert isinstance(context.cache.states[-1].store, KINDS[spec][1])
    path = tmp_path / "a.kvfold"
    context.save(path)
    loaded = kvfold.load(path, model, tokenizer)
    assert_same(loaded.cache, context.cache)
    of_file = context.stats().cold
    if "cold=" not in spec:  # raw entries stay in the file, codes do not
        of_file = of_file._replace(host=0, filed=of_file.host)
    assert loaded.stats() == dataclasses.replace(context.stats(), cold=of_file)
    assert loaded.frame == context.frame and torch.equal(loaded.ids, context.ids)
    answers = [c.ask(QUESTION, max_new_tokens=8) for c in (context, loaded, context)]
    assert len(set(answers)) == 1
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)
    assert_same(loaded.cache, context.cache)


@pytest.mark.parametrize("spec", ["snapkv:window=8", "knorm"])
def test_a_loaded_document_that_is_read_again_shrinks_as_the_saved_one(
    model, tokenizer, tmp_path, spec
):
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 60, keep_scores=True)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    edited = [each.drop((20, 30), mode="reread").shrink(30) for each in (context, loaded)]
    assert_same(edited[1].cache, edited[0].cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_come_back_bit_for_bit(tokenizer, tmp_path, dtype):
    model = new_model(dtype=dtype)
    for spec in ("snapkv", "adakv", KIVI, TURBO, "minicache"):
        context = compressed(model, tokenizer, spec)
        context.save(tmp_path / "a.kvfold")
        assert_same(kvfold.load(tmp_path / "a.kvfold", model, tokenizer).cache, context.cache)


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gpt2", "deepseek_v3", "gemma3n"])
def test_other_layers_and_other_keys_come_back(tokenizer, tmp_path, family):
    changes = {"vocab_size_per_layer_input": 12} if family == "gemma3n" else {}
    model = new_model(family, **changes)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert_same(loaded.cache, context.cache)
    assert loaded.ask(QUESTION, max_new_tokens=8) == context.ask(QUESTION, max_new_tokens=8)
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_reindexed_sinks_are_saved_as_given_whatever_was_read_since(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "streaming_llm")
    context.save(tmp_path / "before.kvfold")
    next_turns(context)
    given = compressed(model, tokenizer, "full").cache.states[0].stored().keys[:, :, :4]
    context = read_on(context)
    context.save(tmp_path / "after.kvfold")
    moved = context.cache.states[0].stored().keys[:, :, :4]
    for name in ("before", "after"):
        with safe_open(tmp_path / f"{name}.kvfold", "pt") as file:
            assert torch.equal(file.get_tensor("layers.0.keys.1")[:4], given[0, 1])
    assert not torch.equal(moved, given)
    loaded = kvfold.load(tmp_path / "after.kvfold", model, tokenizer)
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_sinks_move_after_loading_a_text_that_fitted_the_budget(model, tokenizer, tmp_path):
    tokens = compressed(model, tokenizer, "full").stats().seen
    context = kvfold.compress(model, tokenizer, DOCUMENT, "streaming_llm", tokens)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    steps = [
        [model(torch.tensor([[7]]), past_key_values=c.cache).logits for _ in range(4)]
        for c in (context, loaded)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
    assert not torch.equal(
        loaded.cache.states[0].stored().keys[:, :, :4],
        loaded.cache.states[0].keys_as_given()[:, :, :4],
    )


def test_what_a_decoding_step_left_dead_is_saved_too(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "h2o")
    token = torch.tensor([[5]])
    with torch.no_grad():
        for _ in range(3):
            model(token, past_key_values=context.cache, use_cache=True)
    assert context.cache.states[0].stored().dead == 3
    read_on(context).save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert_same(loaded.cache, context.cache)


def test_a_second_layer_of_a_pair_shares_again(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "minicache")
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    first, second = (layer.stored()._keys.encoded for layer in loaded.cache.states[-2:])
    assert first.shared is second.shared
    shared = read_header(tmp_path / "a.kvfold").same_as
    assert shared["layers.3.keys.directions.0"] == "layers.2.keys.directions.0"


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    small, large = (kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", n) for n in (40, 90))
    small.save(path)
    with opened(path) as file:
        large.save(path)
        file.check()
        assert file.header.budget.amount == 40
    assert read_header(path).budget.amount == 90


FORGED = ("snapkv", "adakv", f"adakv + {TURBO}", KIVI, "think", "minicache")


@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", FORGED)
def test_tensors_that_do_not_fit_are_refused_or_answer_though_their_checksums_fit(
    model, tokenizer, tmp_path, spec
):
    path, refused = tmp_path / "a.kvfold", 0
    compressed(model, tokenizer, spec).save(path)
    first = {n: t for n, t in contents(path)[0].items() if n.startswith("layers.0.")}
    for name, tensor in first.items():
        others = [tensor[None], tensor[..., :-1], tensor[:-1], tensor.double(), tensor.char()]
        for other in others if len(tensor) else []:
            altered = forged(tmp_path / "b.kvfold", path, name, other.clone().contiguous())
            try:
                context = kvfold.load(altered, model, tokenizer)
            except kvfold.KvfoldError:
                refused += 1
            else:
                context.ask(QUESTION, max_new_tokens=2)
                context.stats()
    assert refused > 2 * len(first)


def test_measured_errors_of_another_type_are_refused(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv:window=8 + match", 40).save(path)
    refit = contents(path)[0]["layers.0.refit"]
    altered = tmp_path / "b.kvfold"
    forged(altered, path, "layers.0.refit", refit.char())
    with pytest.raises(kvfold.ContextFileError, match=r"refit of torch\.int8"):
        kvfold.load(altered, model, tokenizer)


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize("spec", FORGED)
@pytest.mark.parametrize(
    "changes", [{"kept": [1]}, {"by_head": []}, {"new": -1}, {"seen": 3}], ids=str
)
def test_numbers_that_do_not_fit_are_refused(model, tokenizer, tmp_path, spec, changes):
    path = tmp_path / "a.kvfold"
    compressed(model, tokenizer, spec).save(path)
    first, *rest = contents(path)[1]["layers"]
    altered = [first | changes, *rest]
    with pytest.raises(kvfold.ContextFileError, match="is damaged"):
        kvfold.load(rewritten(tmp_path / "b.kvfold", path, layers=altered), model, tokenizer)


def test_a_file_of_another_number_of_heads_is_refused(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    compressed(model, tokenizer, "snapkv").save(path)
    layers = [layer | {"kept": layer["kept"][:1]} for layer in contents(path)[1]["layers"]]
    with pytest.raises(kvfold.ContextFileError, match=r"heads=1.*the model has.*heads=2"):
        kvfold.load(rewritten(tmp_path / "b.kvfold", path, layers=layers), model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", " + every:interval=8"])
def test_a_file_whose_scorer_was_fitted_again_is_refused(model, tokenizer, tmp_path, rest):
    spec = zap_of(model, tmp_path)
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec + rest, 20)
    context.save(tmp_path / "a.kvfold")
    kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    zap_of(model, tmp_path, seed=1)
    with pytest.raises(kvfold.ContextFileError, match="have changed since: put back the file"):
        kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    context.save(tmp_path / "a.kvfold")  # by what this process has read
    with pytest.raises(kvfold.ContextFileError, match="have changed since"):
        kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    zap_of(model, tmp_path)
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert loaded.cache.fits.digests == context.cache.fits.digests


def test_parts_by_hand_that_have_changed_are_refused(model, tokenizer, tmp_path):
    parts = tmp_path / "parts.json"
    parts.write_text("[0.9, 0.5, 0.4, 0.2]")
    spec = f"snapkv:window=8 + sizes:file={parts}"
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 0.4)
    context.save(tmp_path / "a.kvfold")
    assert_same(kvfold.load(tmp_path / "a.kvfold", model, tokenizer).cache, context.cache)
    parts.write_text("[0.9, 0.4, 0.5, 0.2]")
    with pytest.raises(kvfold.ContextFileError, match="have changed since"):
        kvfold.load(tmp_path / "a.kvfold", model, tokenizer)


@pytest.mark.parametrize(
    ("spec", "reads"),
    [
        ("zap", {"zap"}),
        ("qfilter", {"qfilter"}),
        ("duo:sinks=4,recent=16", {"duo"}),
        ("snapkv:window=8 + sizes:file=PARTS", {"curve"}),
        ("qfilter + curve + every:interval=8", {"qfilter", "curve"}),
        ("snapkv", set()),
    ],
)
def test_checksums_of_the_files_are_those_of_a_cache_that_reads_them(tmp_path, spec, reads):
    (tmp_path / "parts.json").write_text("[0.9, 0.5, 0.4, 0.2]")
    method = kvfold.parse(spec.replace("PARTS", str(tmp_path / "parts.json")))
    cache = kvfold.CompressedCache(kvfold.bundled_model()[0], method, 0.5)
    assert digests_of(method.stages()) == cache.fits.digests
    assert set(cache.fits.digests) == reads
