# SPDX-License-Identifier: Apache-2.0
"""How a sample is read and asked about: against transformers alone, and against hand-made ids."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from kvfold.eval.run.prompt import SamplePrompt
from tests.helpers.evaluation import Setting, record


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.mark.slow
@pytest.mark.parametrize("question_aware", [False, True])
def test_an_answer_that_must_not_be_empty_does_not_begin_with_a_stop_string(
    setting, question_aware
):
    """LongBench's samsum: `min_length` forbids an end or a line break as the first token only."""
    sample = record(new=4, chat=False)
    prompt = setting.prompt(sample)
    ids = torch.cat([prompt.ids, prompt.question_ids(sample.questions[0])], 1)
    (first,) = setting.greedy(ids, 1)
    mask = torch.ones_like(ids)
    expected = setting.plain.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=4,
        min_length=ids.shape[1] + 1, eos_token_id=[first],
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    stopped = replace(sample, stop=(setting.text([first]),))
    how = {"question_aware": question_aware}
    assert setting.outcome(stopped, **how).answers[0].prediction == ""
    full = setting.outcome(replace(stopped, nonempty=True), **how).answers[0]
    said = setting.text([token for token in expected if token != first])
    assert full.prediction == said != ""


@pytest.mark.parametrize("question_aware", [False, True])
def test_what_a_benchmark_spells_like_a_special_token_is_text(setting, question_aware):
    sample, control = record(), "<|assistant|>"
    asked = replace(sample.questions[0], text=f"{sample.questions[0].text}{control} So?")
    prompt = setting.prompt(replace(sample, context=f"{control}{sample.context}"))
    number = setting.tokenizer.convert_tokens_to_ids(control)
    assert number in setting.ids(control)
    assert number not in prompt.ids
    # The one of the chat template itself.
    assert (prompt.question_ids(asked) == number).sum() == 1
    spelled = replace(sample, context=f"{control}{sample.context}", questions=(asked,))
    assert (
        setting.outcome(spelled, question_aware=question_aware).tokens
        == prompt.ids.shape[1] + (prompt.question_ids(asked).shape[1])
    )


def test_prompts_without_a_template_begin_as_the_tokenizer_begins_them(setting):
    """LongBench calls `tokenizer(prompt)`; a perplexity's first token needs one before it."""
    sample = record(chat=False)
    plain = setting.ids(sample.context)[0].tolist()
    for adds in (False, True):
        tokenizer = copy.deepcopy(setting.tokenizer)
        tokenizer.bos_token = "<|user|>"
        bos = tokenizer.bos_token_id
        if adds:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                "<|user|> $A", "<|user|> $A $B", [("<|user|>", bos)]
            )
        assert (tokenizer("a").input_ids[0] == bos) == adds
        own = SamplePrompt.of(sample, tokenizer).ids[0].tolist()
        assert own == ([bos, *plain] if adds else plain)
        assert SamplePrompt.of(sample, tokenizer, always_bos=True).ids[0].tolist() == [bos, *plain]
