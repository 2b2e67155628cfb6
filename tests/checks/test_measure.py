# SPDX-License-Identifier: Apache-2.0
"""Measured distances against masked dense attention in float64, and what is not measured twice."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import Attack, PromptMeasurements, kept_of_spans, memory
from kvfold.checks.reading import PromptReading, read_full, reading_order
from kvfold.checks.records import CheckStore
from kvfold.generation.reading import read_on
from tests.helpers.models import build, prompts
from tests.helpers.scorers import zap_of
from tests.helpers.truth import MaskedDense, Reader, stock_cache

LENGTH, CONTEXT, TOKENS = 64, 50, 9
IDS = prompts((LENGTH,))[0]


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def measurements(model, folder: Path | None = None) -> PromptMeasurements:
    return PromptMeasurements(model, None, CheckStore("run", folder), TOKENS, 4 * TOKENS)


def kl(full: Tensor, compressed: Tensor) -> Tensor:
    """KL `[S]` in float64."""
    p, c = full.double().log_softmax(-1), compressed.double().log_softmax(-1)
    return (p.exp() * (p - c)).sum(-1)


def greedy(model) -> tuple[Tensor, Tensor]:
    """The model's own greedy tokens `[1, S]`, and the logits `[S, V]` that predict them."""
    reader, found, logits = Reader(copy.deepcopy(model), stock_cache(model)), [], []
    new = IDS
    for _ in range(TOKENS):
        logits.append(reader(new)[0, -1])
        new = logits[-1].argmax()[None, None]
        found.append(new)
    return torch.cat(found, 1), torch.stack(logits)


def prompt(context: int | None, **spans: tuple[int, int]) -> EncodedPrompt:
    return EncodedPrompt("here", IDS, context, spans)


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv:window=4,kernel=3", "streaming_llm_original", "h2o"])
@pytest.mark.parametrize("budget", ["0.5", "20"])
def test_a_context_compressed_alone_equals_masked_dense_attention(
    method: str, budget: str, model
) -> None:
    forced, full = greedy(model)
    cache = kvfold.CompressedCache(model, method, budget)
    truth = MaskedDense(copy.deepcopy(model))
    Reader(model, cache)(IDS[:, :CONTEXT])
    truth(IDS[:, :CONTEXT])
    truth.hide(cache)
    logits = truth(torch.cat([IDS[:, CONTEXT:], forced[:, :-1]], 1))[0, -TOKENS:]
    measured = measurements(model)
    found = measured.distances([prompt(CONTEXT)], (method, budget))[0]
    assert measured.forced([prompt(CONTEXT)])[0].forced == tuple(forced[0].tolist())
    assert found.kl == pytest.approx(kl(full, logits).tolist(), abs=1e-5)
    assert max(found.kl) > 1e-3
    lost = (full.log_softmax(-1) - logits.log_softmax(-1)).gather(1, forced.T)[:, 0]
    assert found.lost == pytest.approx(lost.tolist(), abs=1e-5)
    assert list(found.agrees) == (full.argmax(-1) == logits.argmax(-1)).tolist()


@pytest.mark.parametrize("method", ["snapkv:window=4,kernel=3", "streaming_llm_original", "h2o"])
def test_a_whole_prompt_equals_masked_dense_attention_token_by_token(method: str, model) -> None:
    forced, full = greedy(model)
    cache = kvfold.CompressedCache(model, method, "20")
    truth, reader = MaskedDense(copy.deepcopy(model)), Reader(model, cache)
    logits = [truth(IDS)[0, -1]]
    reader(IDS)
    for token in forced[0, :-1]:
        truth.hide(cache)
        logits.append(truth(token[None, None])[0, -1])
        reader(token[None, None])
    found = measurements(model).distances([prompt(None)], (method, "20"))[0]
    assert found.kl == pytest.approx(kl(full, torch.stack(logits)).tolist(), abs=1e-5)
    assert found.kl[0] == pytest.approx(0, abs=1e-9) and max(found.kl) > 1e-3
    assert found.kept == pytest.approx(20 / LENGTH)


@pytest.mark.parametrize("method", ["snapkv:window=4,kernel=3", "pyramidkv:window=4", "random"])
def test_one_reading_keeps_for_each_budget_what_a_reading_of_its_own_keeps(
    method: str, model
) -> None:
    reading, own = PromptReading(model, None, [prompt(CONTEXT)]), kvfold.parse(method)
    for budget in ("0.3", "0.8", "0.5"):
        alone = kvfold.CompressedCache(model, method, budget)
        Reader(model, alone)(IDS[:, :CONTEXT])
        ours = reading.at(own, budget).cache
        for layer in range(len(alone.states)):
            for head, other in zip(
                ours.positions(layer)[0], alone.positions(layer)[0], strict=True
            ):
                assert torch.equal(head, other)
    reading.release()
    assert reading.nbytes == 0 and reading.at(own, "0.3").cache.stats().kept_fraction <= 0.3


def test_methods_that_observe_the_same_share_a_reading(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Counter[str]()

    def counted(model, cache, *args, **kwargs) -> None:
        reads[str(cache.method)] += 1
        read_on(model, cache, *args, **kwargs)

    monkeypatch.setattr("kvfold.checks.reading.read_on", counted)
    asked = ("knorm", "h2o", "snapkv:window=4", "random", "snapkv:window=8", "dbudgetkv")
    reading = PromptReading(model, None, [prompt(CONTEXT)])
    for name in reading_order(asked):
        method = kvfold.parse(name)
        for budget in ("0.3", "0.8") if method.takes_budget else (None,):
            alone = kvfold.CompressedCache(model, method, budget)
            Reader(model, alone)(IDS[:, :CONTEXT])
            ours = reading.at(method, budget).cache
            for layer in range(len(alone.states)):
                assert torch.equal(ours.positions(layer)[0][0], alone.positions(layer)[0][0])
    assert reads == {str(kvfold.parse(name)): 1 for name in ("snapkv:window=8", "h2o")}


def test_the_floor_is_noise_and_a_full_budget_is_equal(model) -> None:
    measured = measurements(model)
    floor = measured.forced([prompt(CONTEXT)])[0].distances
    assert floor is not None and max(floor.kl) < 1e-6
    found = measured.distances([prompt(CONTEXT)], ("snapkv:window=4", "1.0"))[0]
    assert max(found.kl) < 1e-6 and all(found.agrees)


@pytest.mark.slow
def test_free_answers_are_those_of_kvfold_generate(model) -> None:
    measured = measurements(model)
    for context in (CONTEXT, None):
        assert measured.answers([prompt(context)], ("full", None))[0].tokens == 4 * TOKENS
    cache = kvfold.CompressedCache(model, "h2o", "20")
    out = kvfold.generate(model, IDS, cache=cache, do_sample=False, max_new_tokens=4 * TOKENS)
    model.generation_config.eos_token_id = int(out[0, LENGTH + 10])
    try:
        whole = out[0, LENGTH:].tolist()
        length = whole.index(model.generation_config.eos_token_id) + 1
        (answer,) = measurements(model).answers([prompt(None)], ("h2o", "20"))
        assert (answer.tokens, answer.ended) == (length, True)
    finally:
        model.generation_config.eos_token_id = None


def test_kept_shares_of_spans_are_counted_over_layers_and_heads(model) -> None:
    spans = {"start": (0, 8), "middle": (20, 31)}
    made = PromptReading(model, None, [prompt(CONTEXT, **spans)])
    compressed = made.at(kvfold.parse("snapkv:window=4"), "0.4")
    stored = [head for layer in range(4) for head in compressed.cache.positions(layer)[0]]
    for name, (start, stop) in spans.items():
        kept = sum(int(((head >= start) & (head < stop)).sum()) for head in stored)
        assert kept_of_spans(compressed)[0][name] == kept / (len(stored) * (stop - start))


def test_the_effect_of_a_span_is_the_distance_to_the_prompt_without_it(model) -> None:
    forced, full = greedy(model)
    without = torch.cat([IDS[:, :20], IDS[:, 31:]], 1)
    reader = Reader(copy.deepcopy(model), stock_cache(model))
    logits = reader(torch.cat([without, forced[:, :-1]], 1))[0, -TOKENS:]
    effects = measurements(model).forced([prompt(CONTEXT, middle=(20, 31))])[0].effects
    assert effects is not None
    assert effects["middle"] == pytest.approx(kl(full, logits).mean().item(), abs=1e-5)


def test_what_is_in_the_folder_is_not_measured_again(
    model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ("snapkv:window=4", "0.5")
    first = measurements(model, tmp_path)
    before = first.distances([prompt(CONTEXT)], cell), first.answers([prompt(CONTEXT)], cell)
    monkeypatch.setattr("kvfold.checks.measure.read_full", None)
    monkeypatch.setattr("kvfold.checks.measure.PromptReading", None)
    again = measurements(model, tmp_path)
    after = again.distances([prompt(CONTEXT)], cell), again.answers([prompt(CONTEXT)], cell)
    assert after == before
    other = PromptMeasurements(model, None, CheckStore("other", tmp_path), TOKENS, TOKENS)
    with pytest.raises(TypeError):
        other.distances([prompt(CONTEXT)], cell)
    assert read_full(model, [prompt(CONTEXT)]).lengths == [CONTEXT]


def test_another_fit_of_a_scorer_is_measured_anew(model, tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        cell = (zap_of(model, tmp_path, ",sinks=0,window=0", seed=seed), "0.3")
        measured = measurements(model, tmp_path / "records")
        (own,) = measured.distances([prompt(CONTEXT)], cell)
        assert measured.distances([prompt(CONTEXT)], cell) == [own]
        found.append(own)
    assert found[0].kl != found[1].kl


def test_a_budget_in_bytes_is_that_of_each_prompt_of_a_batch(model) -> None:
    knorm = kvfold.parse("knorm")
    alone = PromptReading(model, None, [prompt(CONTEXT)]).at(knorm, "40KB")
    both = PromptReading(model, None, [prompt(CONTEXT)] * 2).at(knorm, "40KB")
    kept = alone.cache.stats().kept_fraction
    assert both.cache.stats().kept_fraction == kept < 1


def test_an_attack_on_other_texts_is_another_one() -> None:
    first, second = Attack(prompt(None), {"a": "code"}), Attack(prompt(None), {"b": "code"})
    assert len({first.digest, second.digest, first.prompt.digest}) == 3


def test_what_a_method_does_not_need_of_a_reading_is_not_held(model) -> None:
    reading = PromptReading(model, None, [prompt(CONTEXT)])
    reading.at(kvfold.parse("snapkv:window=4 + match"), "0.3")
    for name in ("turboquant", "minicache", "knorm"):
        method, budget = kvfold.parse(name), "0.3" if name == "knorm" else None
        assert reading.serves(method)
        alone = PromptReading(model, None, [prompt(CONTEXT)]).at(method, budget)
        ours = reading.at(method, budget).cache.stats()
        assert ours.nbytes == alone.cache.stats().nbytes, name


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "roberta", "bamba", "jamba", "qwen3_5"])
@pytest.mark.parametrize("context", [None, CONTEXT])
def test_forced_tokens_are_the_likeliest_of_their_own_logits(family, context) -> None:
    own = build(family)
    full = read_full(own, [prompt(context)])
    (said,) = full.answers(own, [()], TOKENS)
    (logits,) = full.logits(own, [said])
    assert logits.argmax(-1).tolist() == said


def test_logits_of_the_full_cache_are_held_as_memory_allows(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, cell = measurements(model), ("knorm", "0.5")
    own = [EncodedPrompt(str(n), prompts((LENGTH,), seed=n)[0], CONTEXT, {}) for n in range(3)]
    expected = [measured.distances([each], cell) for each in own]
    monkeypatch.setattr("kvfold.checks.measure.memory", lambda device: 0)
    bounded = measurements(model)
    assert [bounded.distances([each], cell) for each in own] == expected
    assert len(measured._logits) == 3 and len(bounded._logits) == 1


def test_memory_that_torch_keeps_is_free_for_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (10, 800), "memory_reserved": 700, "memory_allocated": 600}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory(torch.device("cuda")) == (10 + 100) // 2
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert memory(torch.device("cuda")) == 800 // 4
