# SPDX-License-Identifier: Apache-2.0
"""Chat templates of other kinds: with lists of parts, and those in which a text has no place."""

from __future__ import annotations

from typing import Any

import pytest

import kvfold
from kvfold import KvfoldError
from kvfold.hf.chat_template import PromptFrame, conversation
from kvfold.hf.user_text import Content
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer

# As LLaVA's: a message's content is a list of parts, of which the template writes the texts.
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    " </s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
ITEMS = PARTS.replace(" | selectattr('type', 'equalto', 'text')", "")
# As Qwen2-VL's: a text or a list.
EITHER = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}list {{ m['content'][0]['text'] }}{% endif %} </s> {% endfor %}"
)
TWICE = "{{ messages[0]['content'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
ONE_TURN = (
    "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    "<user> {{ messages[0]['content'] }} <assistant> "
)


def tokenizer_of(template: Any) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [PARTS, ITEMS], ids=["selected", "all"])
def test_a_template_of_parts_frames_texts_as_one_of_texts(template: str) -> None:
    tokenizer = tokenizer_of(template)
    frame = PromptFrame.of(tokenizer)
    assert frame == PromptFrame("<user> ", " </s> <assistant> ", " </s> <user> ")
    messages = [("system", "here"), ("user", Content("the <bos> sky")), ("assistant", "is blue")]
    assert conversation(tokenizer, messages) == [
        "<system> here </s> <user> the <",
        "bos> sky </s> <assistant> is blue </s> <assistant> ",
    ]


def test_a_template_of_both_is_given_texts() -> None:
    tokenizer = tokenizer_of(EITHER)
    assert PromptFrame.of(tokenizer) == PromptFrame("<user> ", " </s> ", " </s> <user> ")
    assert conversation(tokenizer, [("user", "the sky")]) == ["<user> the sky </s> "]


def test_a_context_of_a_template_of_parts_answers_as_one_of_texts() -> None:
    model, answers = new_model(), []
    of_texts = PARTS.replace(
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
        "{% endfor %}",
        "{{ m['content'] }}",
    )
    for template in (PARTS, of_texts):
        chat = kvfold.compress(model, tokenizer_of(template), DOCUMENT, "snapkv", 40).chat()
        answers.append([chat.ask(QUESTION, max_new_tokens=4) for _ in range(2)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TWICE, "shows a user's message 2 times"),
        ("<user> <assistant>", "shows a user's message 0 times"),
        ("{{ raise_exception('no') }}", r"refuses a user's message \(no\)"),
        ("{{ messages[0]['content'] + 1 }}", r"refuses a user's message \(.*concatenate"),
    ],
)
def test_a_template_without_a_place_for_a_text_is_refused(template: str, reason: str) -> None:
    tokenizer = tokenizer_of(template)
    with pytest.raises(KvfoldError, match=f"{reason}.*set tokenizer.chat_template"):
        PromptFrame.of(tokenizer)
    with pytest.raises(KvfoldError, match=reason):
        kvfold.compress(new_model(), tokenizer, DOCUMENT, "snapkv", 40)


def test_a_conversation_is_what_the_template_makes_of_it() -> None:
    said = [("user", "the sky"), ("assistant", "is"), ("user", "blue")]
    assert conversation(tokenizer_of(TWICE), said) == ["the skythe skyisblue"]


def test_a_template_that_refuses_a_second_turn_has_none() -> None:
    assert PromptFrame.of(tokenizer_of(ONE_TURN)) == PromptFrame("<user> ", " <assistant> ", None)


def test_of_several_templates_the_default_is_taken_and_must_be_there() -> None:
    named = {"rag": ONE_TURN, "default": PARTS}
    assert PromptFrame.of(tokenizer_of(named)) == PromptFrame.of(tokenizer_of(PARTS))
    tokenizer = tokenizer_of({"tool_use": ONE_TURN, "rag": ONE_TURN})
    wanted = r"templates tool_use, rag and none named default: .*chat_template\['rag'\]"
    with pytest.raises(KvfoldError, match=wanted):
        PromptFrame.of(tokenizer)
    with pytest.raises(KvfoldError, match=wanted):
        conversation(tokenizer, [("user", "the sky")])
    tokenizer.chat_template = tokenizer.chat_template["rag"]
    assert PromptFrame.of(tokenizer).before == "<user> "
