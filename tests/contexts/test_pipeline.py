# SPDX-License-Identifier: Apache-2.0
"""The pipeline: one document, several questions, a context's own answers."""

from __future__ import annotations

import pytest

import kvfold
from kvfold import KvfoldError
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "<assistant> {{ words or '' }}"
)
OTHER = " ".join(DOCUMENT.split()[::-1][:6])


def test_several_questions_of_one_document():
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "knorm", 40, prefill_chunk=32)
    expected = [context.ask(each, max_new_tokens=6) for each in (QUESTION, OTHER)]
    pipe = kvfold.pipeline(model, tokenizer, method="knorm", budget=40, prefill_chunk=32)
    found = pipe(DOCUMENT, questions=[QUESTION, OTHER], max_new_tokens=6)
    assert found["answers"] == expected
    assert found["stats"] == context.stats()
    several = pipe([DOCUMENT, DOCUMENT], question=QUESTION, max_new_tokens=6)
    assert [one["answers"] for one in several] == [expected[:1]] * 2


def test_options_of_a_call_replace_those_of_the_pipeline():
    model, tokenizer = new_model(), word_tokenizer()
    pipe = kvfold.pipeline(model, tokenizer, method="knorm", budget=40)
    found = pipe(DOCUMENT, question=QUESTION, method="streaming_llm", budget=20, max_new_tokens=6)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "streaming_llm", 20)
    assert found["answers"] == [context.ask(QUESTION, max_new_tokens=6)]


def test_a_document_without_question_is_refused():
    pipe = kvfold.pipeline(new_model(), word_tokenizer(), method="knorm", budget=40)
    with pytest.raises(KvfoldError, match="questions="):
        pipe(DOCUMENT)


def test_what_is_no_text_is_refused():
    pipe = kvfold.pipeline(new_model(), word_tokenizer(), method="knorm", budget=40)
    with pytest.raises(KvfoldError, match="give question="):
        pipe(DOCUMENT, questions=QUESTION)
    for questions in ([""], [QUESTION, 3]):
        with pytest.raises(KvfoldError, match="each question must be a text"):
            pipe(DOCUMENT, questions=questions)
    with pytest.raises(KvfoldError, match="a document must be a text, not int"):
        pipe(3, question=QUESTION)
    with pytest.raises(KvfoldError, match="leave out batch_size="):
        pipe([DOCUMENT, DOCUMENT], question=QUESTION, batch_size=2)


def test_every_option_of_compress_reaches_it():
    model, tokenizer = new_model(max_position_embeddings=100), word_tokenizer()
    pipe = kvfold.pipeline(model, tokenizer, method="knorm", budget=40)
    asked = {"question": QUESTION, "max_new_tokens": 4}
    with pytest.raises(KvfoldError, match="allow_longer=True"):
        pipe(DOCUMENT, **asked)
    assert pipe(DOCUMENT, allow_longer=True, special_tokens=True, **asked)["answers"]
    longer = {"allow_longer": True, **asked}
    assert pipe(DOCUMENT, keep_scores=True, **longer)["answers"]
    pieces = pipe(DOCUMENT, compress="per_chunk", prefill_chunk=50, **longer)
    assert pieces["stats"].per_chunk == 50


def test_a_system_message_and_a_template_reach_the_document_and_the_questions():
    model, tokenizer = new_model(), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    given = {"system": "here the sky is green", "template": {"words": "we go"}}
    context = kvfold.compress(model, tokenizer, DOCUMENT, "knorm", 40, **given)
    expected = context.ask(QUESTION, max_new_tokens=6)
    pipe = kvfold.pipeline(model, tokenizer, method="knorm", budget=40, **given)
    assert pipe(DOCUMENT, question=QUESTION, max_new_tokens=6)["answers"] == [expected]
    pipe = kvfold.pipeline(model, tokenizer, method="knorm", budget=40)
    found = pipe(DOCUMENT, question=QUESTION, max_new_tokens=6, **given)
    assert found["answers"] == [expected] and found["stats"] == context.stats()
    with pytest.raises(KvfoldError, match=r"budget=0\.6$"):
        kvfold.pipeline(model, tokenizer, compression_ratio=0.4)
