# SPDX-License-Identifier: Apache-2.0
"""A local reference: the endpoint's whole list is told apart, from all its probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold.bundled import bundled_model
from kvfold.checks.engines.reference import LocalReference
from kvfold.checks.engines.tokens import TopTokens
from kvfold.errors import KvfoldError

ASK = [{"role": "user", "content": "The sky is blue. The grass is"}]


@pytest.mark.slow
def test_the_bound_is_that_of_full_probabilities_by_hand() -> None:
    model, tokenizer = bundled_model()
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        p = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).numpy()
    texts = {number: tokenizer.decode([number]) for number in np.argsort(-p)[:40]}
    clear = [n for n, text in texts.items() if text.strip() and "�" not in text]
    q = {n: 0.9 / 2**place for place, n in enumerate(clear[1:6], 1)}
    found = TopTokens({texts[n].encode(): of for n, of in q.items()}, texts[clear[0]].encode(), 9)
    made = LocalReference(model, tokenizer).compared(ASK, found)
    cells = np.array([[p[n] for n in q], [*q.values()]])
    cells = np.concatenate([cells, 1 - cells.sum(1, keepdims=True)], 1)
    assert made.kl_at_least == pytest.approx(
        (cells[0] * np.log(cells[0] / cells[1])).sum(), rel=1e-5
    )
    assert made.covered == pytest.approx(sum(p[n] for n in q), rel=1e-5)
    assert made.read == (9, len(ids)) and not made.agrees
    likeliest = texts[clear[0]].encode()
    assert clear[0] == p.argmax()
    same = TopTokens({likeliest: 0.5}, likeliest, None)
    assert LocalReference(model, tokenizer).compared(ASK, same).agrees
    with pytest.raises(KvfoldError, match="token 'zzqq' is none of the reference's tokenizer"):
        LocalReference(model, tokenizer).compared(ASK, TopTokens({b"zzqq": 0.5}, b"zzqq", None))
    tokenizer.chat_template = None
    with pytest.raises(KvfoldError, match="no chat template"):
        LocalReference(model, tokenizer).compared(ASK, same)
