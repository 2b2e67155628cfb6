# SPDX-License-Identifier: Apache-2.0
"""Answers: where they begin and end, their pieces of text, and how they are sampled."""

from __future__ import annotations

import random
from threading import Event
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import kvfold
from kvfold import KvfoldError
from kvfold.cache.fork import fork
from kvfold.contexts.answer import CLEANED_UP, AnswerStream
from tests.helpers.chats import compressed, expected
from tests.helpers.contexts import QUESTION, new_model
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build
from tests.helpers.tokenizers import PROMPT, WORDS, cleaning_tokenizers, word_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def test_the_token_that_ends_an_answer_comes_once(tokenizer):
    model = new_model()
    context = compressed(model, tokenizer, "snapkv")
    free = context.ask(QUESTION, max_new_tokens=8).split()
    end = tokenizer.convert_tokens_to_ids(free[3])
    model.generation_config.eos_token_id = [end]
    chat = context.chat()
    before = chat.ids.shape[1]
    answer = chat.ask(QUESTION, max_new_tokens=8).split()
    assert answer == free[: free.index(free[3]) + 1]
    asked = len(tokenizer(f"\n\n{QUESTION}\n", add_special_tokens=False).input_ids)
    assert chat.ids.shape[1] == before + asked + len(answer) - 1
    assert chat.reader.get_seq_length() == chat.ids.shape[1]


@pytest.mark.slow
def test_what_begins_the_answer_is_not_part_of_it_but_of_the_turn(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    chat = context.chat()
    first = chat.ask(QUESTION, answer_prefix="we go", max_new_tokens=4)
    assert first == expected(context, f"\n\n{QUESTION}\nwe go", 4)
    second = chat.ask(QUESTION, max_new_tokens=4)
    assert second == expected(context, f"\n\n{QUESTION}\nwe go {first}\n\n{QUESTION}\n", 4)


@pytest.mark.parametrize("spec", ["snapkv", "adakv"])
def test_an_answer_ends_before_a_stop_string(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    free = context.ask(QUESTION, max_new_tokens=12)
    stop = " ".join(free.split()[4:6])
    cut = free[: free.index(stop)]
    assert context.ask(QUESTION, max_new_tokens=12, stop=stop) == cut.strip()
    assert context.ask(QUESTION, max_new_tokens=12, stop=["nothing", stop]) == cut.strip()
    pieces = list(context.stream(QUESTION, max_new_tokens=12, stop=[stop]))
    assert "".join(pieces) == cut
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=12, stop=stop)
    second = chat.ask(QUESTION, max_new_tokens=4)
    assert second == expected(context, f"\n\n{QUESTION}\n{cut}\n\n{QUESTION}\n", 4)


class Letters:
    """A tokenizer of bytes, of which several make a character."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def pieces_of(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], AnswerStream, list[int]]:
    """What is shown after each byte of a text, the answer, and the tokens that make it up."""
    shown: list[str] = []
    data = list(text.encode())
    answer = AnswerStream(Letters(), 1, stop, shown.append, Event())  # type: ignore[arg-type]
    for end in range(1, len(data) + 1):
        if bool(answer(torch.tensor([[0, *data[:end]]]), None)):
            data = data[:end]
            break
    return shown, answer, answer.finish(data)


def test_pieces_are_whole_characters():
    shown, answer, tokens = pieces_of("aé€b")
    assert shown == ["a", "é", "€", "b"] and answer.text == "aé€b"
    assert bytes(tokens).decode() == "aé€b"


def test_words_around_a_token_without_text_stay_apart(tokenizer):
    tokens = tokenizer.convert_tokens_to_ids(
        ["the", "<pad>", "sky", "is", "<pad>", "<bos>", "blue"]
    )
    shown: list[str] = []
    answer = AnswerStream(tokenizer, 0, (), shown.append, Event())
    for end in range(1, len(tokens) + 1):
        answer(torch.tensor([tokens[:end]]), None)
    assert "".join(shown) == "the sky is blue"


def test_pieces_of_a_real_tokenizer_make_up_the_text():
    _, tokenizer = kvfold.bundled_model()
    text = "The number is 2590996, said Zoë — naïve café owners; 你好!\n\nReally?"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    shown: list[str] = []
    answer = AnswerStream(tokenizer, 0, (), shown.append, Event())
    for end in range(1, len(tokens) + 1):
        answer(torch.tensor([tokens[:end]]), None)
    answer.finish(tokens)
    assert "".join(shown) == answer.text == tokenizer.decode(tokens)
    assert len(shown) > 10


def streamed(tokenizer: Any, tokens: list[int], *stop: str) -> tuple[str, AnswerStream, list[int]]:
    """What is shown of an answer of these tokens, the answer, and the tokens generated."""
    shown: list[str] = []
    answer = AnswerStream(tokenizer, 0, stop, shown.append, Event())
    for end in range(1, len(tokens) + 1):
        if bool(answer(torch.tensor([tokens[:end]]), None)):
            tokens = tokens[:end]
            break
    answer.finish(tokens)
    return "".join(shown), answer, tokens


@pytest.mark.parametrize("name", ["words", "pieces", "letters", "bytes"])
def test_an_answer_is_what_its_tokens_are_decoded_to(name):
    """Of tokenizers that change the text of a token for the sake of later ones."""
    tokenizer, draw = cleaning_tokenizers()[name], random.Random(0)
    grown = 0
    for _ in range(100):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 14))]
        parts = [tokenizer.decode(tokens[: n + 1], skip_special_tokens=True) for n in range(14)]
        whole = parts[-1]
        grown += all(whole.startswith(part) for part in parts)
        shown, answer, _ = streamed(tokenizer, tokens)
        assert shown == answer.text == whole
        if whole:
            start = draw.randrange(len(whole))
            stop = whole[start : start + draw.randint(1, 4)]
            shown, answer, tokens = streamed(tokenizer, tokens, stop)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            assert answer.stopped and shown == answer.text == text[: text.index(stop)]
    assert grown < 95  # else nothing was changed


def test_the_clean_up_of_spaces_changes_the_last_characters_only():
    tokenizer, draw = cleaning_tokenizers()["words"], random.Random(0)
    letters = " " * 3 + "'" * 3 + "ntmsver.,a"
    for _ in range(20_000):
        text = "".join(draw.choices(letters, k=draw.randint(1, 16)))
        part = tokenizer.clean_up_tokenization(text[: draw.randint(0, len(text))])
        assert tokenizer.clean_up_tokenization(text).startswith(part[:-CLEANED_UP])


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "pieces", "letters"])
def test_questions_are_answered_by_tokenizers_that_clean_up(name):
    tokenizer = cleaning_tokenizers()[name]
    model = build("llama", vocab_size=len(tokenizer))
    document, question = "the sky . is n't blue", "is it , ' s ?"
    context = kvfold.compress(model, tokenizer, document, "full")
    ids = tokenizer(f"<bos>{document}\n\n{question}\n", return_tensors="pt").input_ids
    made = model.generate(ids, do_sample=False, max_new_tokens=30)
    text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(context.stream(question, max_new_tokens=30)) == text
    assert context.ask(question, max_new_tokens=30) == text.strip()


def test_half_a_character_at_the_end_is_shown_as_such():
    shown: list[str] = []
    answer = AnswerStream(Letters(), 0, (), shown.append, Event())  # type: ignore[arg-type]
    answer(torch.tensor([[97, 0xC3]]), None)
    assert shown == []
    answer.finish([97, 0xC3])
    assert "".join(shown) == answer.text == "a\ufffd"


def test_what_may_begin_a_stop_string_is_held_back():
    shown, answer, tokens = pieces_of("one two END three", ("END",))
    assert "".join(shown) == answer.text == "one two " and answer.stopped
    assert bytes(tokens).decode() == "one two "
    shown, answer, _ = pieces_of("an EN and an E", ("END", ""))
    assert "".join(shown) == answer.text == "an EN and an E" and not answer.stopped
    assert "E" not in shown[:-1] and "EN " in shown
    shown, answer, _ = pieces_of("abcabd", ("abd", "cab"))
    assert answer.text == "ab"


def test_sampling_takes_the_options_of_generate(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 10}
    torch.manual_seed(1)
    answers = [context.ask(QUESTION, **options) for _ in range(3)]
    torch.manual_seed(1)
    assert context.ask(QUESTION, **options) == answers[0]
    assert len(set(answers)) > 1
    with pytest.raises(KvfoldError, match="a question has one answer"):
        context.ask(QUESTION, num_beams=2)


def test_a_generation_config_changes_an_answer_but_not_their_number(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    several = GenerationConfig(num_return_sequences=2, do_sample=True)
    with pytest.raises(KvfoldError, match="set num_beams and num_return_sequences to 1"):
        context.ask(QUESTION, generation_config=several)
    plain = context.ask(QUESTION, max_new_tokens=5)
    assert context.ask(QUESTION, max_new_tokens=5, return_dict_in_generate=True) == plain
    own = model.generation_config
    try:
        model.generation_config = GenerationConfig(num_beams=2)
        with pytest.raises(KvfoldError, match="to 1"):
            context.ask(QUESTION)
        assert context.ask(QUESTION, max_new_tokens=5, num_beams=1) == plain
    finally:
        model.generation_config = own


def test_penalties_see_the_document(model, tokenizer):
    document = " ".join(["the", "grass", "is"] * 20)
    context = kvfold.compress(model, tokenizer, document, "snapkv", 40)
    answer = context.ask("here", max_new_tokens=5, no_repeat_ngram_size=1)
    assert set(answer.split()) <= {"green", "sky", "blue", "we", "go"}


@notices_drops
def test_questions_on_both_sides_of_the_length_at_which_rope_changes(tokenizer):
    """`generate` of such a model would drop the cache when a text passes that length (Phi-3)."""
    model = longrope()
    for words in (16, 40):
        document = " ".join(WORDS[i % 9] for i in range(words))
        context = kvfold.compress(model, tokenizer, document, "snapkv:window=4", 12)
        reader, tokens = fork(context.cache), []
        new = tokenizer(f"\n\n{QUESTION}\n", return_tensors="pt").input_ids
        for _ in range(4):  # by the model's own forwards
            with torch.no_grad():
                new = model(new, past_key_values=reader).logits[:, -1:].argmax(-1)
            tokens.append(int(new))
        expected = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert context.ask(QUESTION, max_new_tokens=4) == expected
    with pytest.raises(kvfold.UnsupportedModel, match="changes its rotary frequencies"):
        kvfold.compress(model, tokenizer, PROMPT[:100], "full").ask(QUESTION, max_new_tokens=40)


def test_what_is_no_text_and_no_piece_is_refused(model, tokenizer):
    for document in (None, b"the sky", ["the", "sky"]):
        with pytest.raises(KvfoldError, match="a text is wanted, not"):
            kvfold.compress(model, tokenizer, document, "knorm", 8)
    context = kvfold.compress(model, tokenizer, QUESTION, "knorm", 8)
    with pytest.raises(KvfoldError, match="a text is wanted, not NoneType"):
        context.ask(None)
    with pytest.raises(KvfoldError, match="a text is wanted, not NoneType"):
        context.chat().add(QUESTION, None)
    with pytest.raises(KvfoldError, match="not 'per-chunk'"):
        kvfold.compress(model, tokenizer, QUESTION, "knorm", 8, compress="per-chunk")
    with pytest.raises(KvfoldError, match="positive number of tokens, not 0"):
        kvfold.compress(model, tokenizer, QUESTION, "knorm", 8, prefill_chunk=0)
