# SPDX-License-Identifier: Apache-2.0
"""The loss of one answer, against forcing by hand through transformers' own cache."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

import kvfold
from kvfold.cache.fork import fork
from kvfold.serve.shadow import mean_kl
from tests.helpers.contexts import DOCUMENT


@torch.no_grad()
def by_hand(model, context, question, answer):
    """Token by token, in float64: KL from transformers' own cache to a fork of the context."""
    prompt = [*context.ids[0].tolist(), *question]
    stock = model(torch.tensor([[*prompt, *answer[:-1]]]), past_key_values=DynamicCache())
    full = stock.logits[0, len(prompt) - 1 :].double().log_softmax(-1)
    reader, found = fork(context.cache), []
    for token in [*question, *answer[:-1]]:
        found.append(model(torch.tensor([[token]]), past_key_values=reader).logits[0, -1])
    theirs = torch.stack(found[len(question) - 1 :]).double().log_softmax(-1)
    return (full.exp() * (full - theirs)).sum(-1).mean().item()


@pytest.mark.parametrize(
    ("method", "budget"),
    [("snapkv", 40), ("kvzip", 40), ("kivi:bits=4,group=8,residual=32", None)],
)
@pytest.mark.parametrize("tokens", [1, 70])
def test_a_loss_is_the_mean_kl_of_the_answer_forced_by_hand(
    model, tokenizer, method, budget, tokens
):
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, budget)
    question = [3, 7, 5]
    answer = torch.randint(3, 12, (tokens,), generator=torch.manual_seed(0)).tolist()
    expected = by_hand(model, context, question, answer)
    prompt = [*context.ids[0].tolist(), *question]
    found = mean_kl(model, fork(context.cache), prompt, answer)
    assert math.isclose(found, expected, rel_tol=1e-2, abs_tol=1e-6) and expected > 1e-5


def test_a_full_context_loses_nothing(model, tokenizer):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "full")
    prompt = [*context.ids[0].tolist(), 4]
    assert mean_kl(model, fork(context.cache), prompt, [5, 6, 7, 8]) < 1e-6
