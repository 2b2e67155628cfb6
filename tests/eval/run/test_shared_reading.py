# SPDX-License-Identifier: Apache-2.0
"""One reading serves methods and budgets, each as a reading of its own would."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.prompt_batch import PromptBatch
from kvfold.eval.run.question_agnostic import _compressed
from kvfold.measure.cost import measured
from tests.helpers.budgets import NAMED, needs_driver
from tests.helpers.evaluation import Setting, contents, equal, record, rounded_alike
from tests.helpers.models import build

COMPOSED = [
    "snapkv:window=8 + kivi:group=8,residual=8",
    "snapkv:window=8 + match",
    "kvzip + match",
    "h2o + merge:rule=d2o",
]
SPECS = [*NAMED, *COMPOSED]
BUDGETS = ["0.4", "16", "0.8"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


def cells_of(
    setting: Setting, specs: list[str], task: str = "kv_retrieval", **how
) -> list[EvalCell]:
    """Every method at every budget, if it takes one, and whole."""
    return [
        setting.cell(task, spec, budget, **how)
        for spec in specs
        for budget in (BUDGETS if kvfold.parse(spec).takes_budget else [None])
    ]


def test_methods_of_every_kind_are_compared():
    assert {"kvzip", "adakv", "h2o", "pyramidkv", "d2o", "random", "kivi", "roco"} <= {
        spec.partition(":")[0] for spec in SPECS
    }
    assert any(needs_driver(spec) for spec in SPECS)


@pytest.mark.whole
def test_contexts_from_shared_readings_are_those_of_readings_of_their_own(setting):
    sample, forwards, own = record(count=20), [], 0
    specs = [spec for spec in SPECS if "when=first_decode" not in spec]
    cells = cells_of(setting, specs)
    kvfold.CompressedCache(setting.model, "full")  # a model's first cache is tried out
    hook = setting.model.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        batch = PromptBatch.of([setting.prompt(sample)], setting.model.device)
        shared = {}
        for each in _compressed(setting.model, batch, cells):
            assert not isinstance(each.cache, Exception), each.cell
            shared[each.cell] = contents(each.cache)
        together = len(forwards)
        for cell in cells:
            forwards.clear()
            alone = kvfold.compress(
                setting.model, setting.tokenizer, sample.context, cell.method, cell.budget
            ).cache
            own += len(forwards)
            # Attention that is summed up for another method is added up in another order.
            assert equal(shared[cell], contents(alone), rounded_alike), cell
    finally:
        hook.remove()
    assert set(shared) == set(cells) and together < own / 4


@pytest.mark.parametrize("method", ["random", "leverage"])
def test_a_reading_for_all_draws_by_the_sample_and_its_seed(setting, method):
    batch = PromptBatch.of([setting.prompt(record(index=3))], setting.model.device)
    own, others = setting.cell("kv_retrieval", method, "0.4"), cells_of(setting, ["knorm"])
    for seed in (0, 5):
        cells = [each.model_copy(update={"seed": seed}) for each in (own, *others)]
        (alone,) = _compressed(setting.model, batch, cells[:1])
        together = {each.cell: each.cache for each in _compressed(setting.model, batch, cells)}
        assert equal(contents(together[cells[0]]), contents(alone.cache))


@pytest.mark.whole
def test_answers_in_view_of_the_question_are_those_of_generate(setting):
    """The answer's first token comes from the shared reading, the others from each cache."""
    sample = record(count=20, new=6)
    cells = cells_of(setting, SPECS, question_aware=True)
    found = {line.cell: line for line in setting.run(sample, *cells)}
    prompt = setting.prompt(sample)
    ids = torch.cat([prompt.ids, prompt.question_ids(sample.questions[0])], 1)
    said = set()
    for cell in cells:
        cache = kvfold.CompressedCache(
            setting.model, cell.method, cell.budget, tokenizer=setting.tokenizer
        )
        out = kvfold.generate(setting.model, ids, cache=cache, do_sample=False, max_new_tokens=6)
        outcome = found[cell].outcome
        assert outcome is not None, found[cell].error
        answer = setting.text(out[0, ids.shape[1] :].tolist())
        assert outcome.answers[0].prediction == answer, cell
        said.add(answer)
    assert len(said) > 3


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_sliding_layers_and_latents_get_every_budget_too(setting, family):
    """Latents are compressed inside the forward: each budget reads for itself."""
    model, sample, spec = build(family, vocab_size=2048), record(), "snapkv:window=8"
    cells = [setting.cell("kv_retrieval", spec, budget) for budget in ("20", "12345B")]
    batch = PromptBatch.of([setting.prompt(sample)], model.device)
    found = list(_compressed(model, batch, cells))
    assert len(found) == 2
    for each in found:
        alone = kvfold.compress(model, setting.tokenizer, sample.context, spec, each.cell.budget)
        assert equal(contents(each.cache), contents(alone.cache))
        assert alone.stats().kept_fraction < 1


def test_what_compresses_while_it_answers_cannot_be_asked_several_questions(setting):
    spec = "simlayerkv:window=8,when=first_decode"
    assert "first generated token" in setting.error(record(), spec)
    assert setting.outcome(record(), spec, question_aware=True).answers[0].tokens == 6


def test_one_budget_that_is_too_small_leaves_the_others(setting):
    for budgets in (["4", "20"], ["20", "4"]):
        cells = [setting.cell("kv_retrieval", "snapkv:window=8", budget) for budget in budgets]
        found = {sample.cell.budget: sample for sample in setting.run(record(), *cells)}
        assert "raise it to at least 8" in found["4"].error
        assert found["20"].outcome.held.kept == pytest.approx(20 / found["20"].outcome.held.seen)


@pytest.mark.parametrize("aware", [False, True])
def test_operations_are_those_of_forwards_alone(setting, aware):
    """A full cache's are the model's; a compressed one's steps take less."""
    sample = record(count=20, new=4)
    cells = cells_of(setting, ["full", "snapkv:window=8"], question_aware=aware)
    outcomes = [line.outcome for line in setting.run(sample, *cells)]
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    ids = torch.cat([prompt.ids, asked], 1) if aware else prompt.ids
    with torch.no_grad(), measured(setting.plain.device) as reading:
        out = setting.plain(ids, logits_to_keep=1)
    past = out.past_key_values
    with torch.no_grad():
        if not aware:
            setting.plain(asked, past_key_values=past)
        # The step that is measured comes after the second token with the question in view.
        setting.plain(ids[:, :1], past_key_values=past) if aware else None
        with measured(setting.plain.device) as step:
            setting.plain(ids[:, :1], past_key_values=past, logits_to_keep=1)
    full, *small = outcomes
    assert full.prefill_operations == reading.operations
    assert full.step_operations == step.operations
    for each in small:
        assert each.prefill_operations > full.prefill_operations
        assert each.step_operations < full.step_operations
