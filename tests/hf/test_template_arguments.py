# SPDX-License-Identifier: Apache-2.0
"""System messages and arguments of chat templates: kept whole, kept in files, stripped of turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.contexts.files.format import read_header
from kvfold.hf.chat_template import PromptFrame, conversation
from kvfold.hf.template_arguments import date_told, read_by
from tests.helpers.chats import TEMPLATE
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer

# As Qwen3's: earlier answers are shown without their reasoning, which ends with "</think>".
THINKS = (
    "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set c = c.split('go')[-1] | trim if 'go' in c else c %}{% endif %}"
    "{{ '<' + m['role'] + '> ' + c + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ 'we go ' }}{% endif %}"
    "{% endif %}"
)
# As Mistral's: the system message stands in the last user's message.
LAST = (
    "{% set s = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if m['role'] == 'user' %}<user> {% if loop.last and s %}{{ s }} : {% endif %}"
    "{{ m['content'] }} <assistant> {% else %}{{ m['content'] }} </s> {% endif %}{% endfor %}"
)
DROPS = (
    "{% for m in messages if m['role'] != 'system' %}"
    "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
)
REFUSES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + DROPS
)
READS = (
    (
        "{% set ns = namespace(a=1) %}"
        "{% if not date_string is defined %}{% set date_string = 'May' %}{% endif %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ documents | length if documents }}"
        "{% if strange %}{{ raise_exception('no') }}{% endif %}{{ 'On ' + date_string + ' ' }}"
    )
    + TEMPLATE
    + "{% generation %}{% endgeneration %}"
)
SYSTEM, OFF = "here the sky is green", {"enable_thinking": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


def tokenizer_of(template: str | None) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "kvzip:instruction=true"])
def test_a_system_message_is_read_kept_by_kvzip_and_held_by_the_file(model, method, tmp_path):
    tokenizer = tokenizer_of(TEMPLATE)
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, 60, system=SYSTEM)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": DOCUMENT}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    opening = whole[: whole.index(DOCUMENT)]
    if "instruction" not in method:
        ids = tokenizer(opening + DOCUMENT, add_special_tokens=False).input_ids
        assert context.ids.tolist() == [ids]
    before = len(tokenizer(context.frame.before, add_special_tokens=False).input_ids)
    assert context.span(DOCUMENT) == (before, context.ids.shape[1])
    if "kvzip" in method:
        assert context.cache.phase.prefix.tolist() == [before]
        for state in context.cache.states:
            for head in state.columns()[0]:
                assert set(range(before)) <= set(head.tolist())
    context.save(tmp_path / "a.kvfold")
    assert read_header(tmp_path / "a.kvfold").system == SYSTEM
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert loaded.frame == context.frame
    assert loaded.ask(QUESTION, max_new_tokens=4) == context.ask(QUESTION, max_new_tokens=4)


@pytest.mark.slow
def test_texts_of_one_system_message_only_are_joined(model):
    tokenizer = tokenizer_of(TEMPLATE)
    made = [
        kvfold.compress(model, tokenizer, DOCUMENT, "knorm", 60, system=s) for s in (SYSTEM, None)
    ]
    with pytest.raises(KvfoldError, match="one system message"):
        kvfold.join(made)


@pytest.mark.parametrize(
    ("template", "given", "reason"),
    [
        (None, {"system": SYSTEM}, "no chat template"),
        (None, {"template": OFF}, "no chat template"),
        (DROPS, {"system": SYSTEM}, "drops system messages"),
        (REFUSES, {"system": SYSTEM}, r"refuses a system message \(no system\)"),
        (TEMPLATE, {"system": "a <bos>"}, "spells a control token"),
        (TEMPLATE, {"system": 3}, "a text is wanted"),
        (THINKS, {"template": {"enable_thinkin": False}}, "does not read 'enable_thinkin'"),
        (THINKS, {"template": {"add_generation_prompt": False}}, "is no argument"),
        (THINKS, {"template": {"bos_token": "the"}}, "does not read 'bos_token'"),
        (THINKS, {"template": {"enable_thinking": object()}}, "as JSON"),
        (THINKS, {"template": {"enable_thinking": ["<bos>"]}}, "spells a control token"),
        (THINKS, {"template": "enable_thinking"}, "names and values"),
        *(
            (THINKS, {"template": {name: 1}}, f"does not read '{name}': .* reads enable_thinking$")
            for name in ("m", "c", "content", "role", "assistant", "trim", "if")
        ),
        (TEMPLATE, {"template": {"message": "a"}}, "it reads no arguments"),
        (READS, {"template": {"raise_exception": "a"}}, "does not read 'raise_exception'"),
        *(
            (READS, {"template": {"tools": tools}}, "refuses its arguments tools")
            for tools in ("x", [5], ["f"], 5)
        ),
        (READS, {"template": {"documents": ["a"]}}, "refuses its arguments documents"),
        (READS, {"template": {"date_string": 5}}, "refuses its arguments date_string"),
        ("{% for m in messages %}{{ m", {"template": OFF}, "is damaged"),
    ],
)
def test_what_a_template_does_not_take_is_refused(model, template, given, reason):
    with pytest.raises(KvfoldError, match=reason):
        kvfold.compress(model, tokenizer_of(template), DOCUMENT, "snapkv", 40, **given)


def test_a_template_reads_what_it_does_not_set():
    tokenizer = tokenizer_of(READS)
    assert read_by(tokenizer) == {"date_string", "documents", "strange", "tools"}
    tokenizer.chat_template = {"default": READS, "other": THINKS}
    assert read_by(tokenizer) == {"date_string", "documents", "enable_thinking", "strange", "tools"}


def test_a_system_message_stays_where_the_document_is_read():
    frame = PromptFrame.of(tokenizer_of(LAST), SYSTEM)
    assert frame.before == f"<user> {SYSTEM} : " and frame.between == " </s> <user> "


def test_arguments_are_those_of_the_file(model, tmp_path):
    tokenizer = tokenizer_of(THINKS)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40, template=OFF)
    assert context.frame.after == " </s> <assistant> we go "
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    asked = loaded.ask(QUESTION, template=OFF, max_new_tokens=4)
    assert asked == context.ask(QUESTION, max_new_tokens=4)
    with pytest.raises(KvfoldError, match=r"other arguments .*\(enable_thinking=False\)"):
        loaded.ask(QUESTION, template={"enable_thinking": True})
    with pytest.raises(KvfoldError, match="other arguments"):
        loaded.chat(template={})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [None, 200])
def test_what_the_template_strips_of_earlier_turns_is_not_read_by_later_ones(family, budget):
    model, tokenizer = new_model(family), tokenizer_of(THINKS)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "full", template=OFF)
    chat = context.chat(budget)
    said = [{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}]
    for _ in range(3):
        prompt = tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True, **OFF
        )
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        right = tokenizer.decode(out[0, ids.shape[1] :])
        assert chat.ask(QUESTION, max_new_tokens=6) == right
        said += [{"role": "assistant", "content": right}, {"role": "user", "content": QUESTION}]
    rendered = tokenizer.apply_chat_template(said[:-1], tokenize=False, **OFF)
    whole = tokenizer(rendered.removesuffix(" </s> "), add_special_tokens=False).input_ids
    assert chat.ids[0].tolist() == whole


def test_reasoning_is_left_out_of_turns_that_are_added(model):
    context = kvfold.compress(model, tokenizer_of(THINKS), DOCUMENT, "full", template=OFF)
    chat, plain = context.chat(), context.chat()
    chat.add(QUESTION, "the grass go blue")
    plain.add(QUESTION, "blue")
    assert torch.equal(chat.ids, plain.ids)


def test_a_date_is_named_where_a_prefix_differs(model):
    tokenizer = tokenizer_of("{{ strftime_now('%d') }} " + TEMPLATE)
    cache = kvfold.CompressedCache(model, "snapkv", 40, tokenizer=tokenizer)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    kvfold.generate(model, ids, cache=cache, max_new_tokens=2)
    with pytest.raises(KvfoldError, match=r"writes the date \(strftime_now\)"):
        kvfold.generate(model, ids.flip(1), cache=cache, max_new_tokens=2)
    assert date_told(tokenizer_of(TEMPLATE)) == "" == date_told(None)
    assert "date_string" in date_told(tokenizer_of("{{ date_string or strftime_now('%d') }}"))


def test_a_conversation_blames_the_arguments_that_its_template_refuses():
    tokenizer = tokenizer_of(READS)
    with pytest.raises(KvfoldError, match="refuses its arguments tools"):
        conversation(tokenizer, [("user", "the sky")], {"tools": "x"})
    tokenizer.chat_template = REFUSES
    with pytest.raises(KvfoldError, match="refuses messages of system, user: no system"):
        conversation(tokenizer, [("system", "the sky"), ("user", "the sky")])
