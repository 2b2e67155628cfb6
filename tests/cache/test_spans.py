# SPDX-License-Identifier: Apache-2.0
"""Spans: token ranges found from text, by offsets and by decoding, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.cache.spans import span, spans_of
from tests.helpers.models import build

TEXT = "Bob met Alice Müller in Zürich 🏔. Alice paid 12 €, then Bob left."
PARTS = ["Alice Müller", "met", "Zürich 🏔", "12 €", "B", "Bob left.", "🏔", "aid 1"]


def made(**options) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a line, which writes a first token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=275,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT, "Alice and Bob"] * 3, trainer)
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", **options)


class WithoutOffsets:
    """A tokenizer that knows no offsets, as those written in Python do."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens=True):
        return self.tokenizer(text, add_special_tokens=add_special_tokens)

    def decode(self, ids, **options):
        return self.tokenizer.decode(ids, **options)


class WrongOffsets(WithoutOffsets):
    """A tokenizer whose offsets are empty, as some released files' are."""

    is_fast = True

    def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False):
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens)
        if return_offsets_mapping:
            encoded["offset_mapping"] = [(0, 0)] * len(encoded.input_ids)
        return encoded


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [lambda t: t, WithoutOffsets, WrongOffsets])
@pytest.mark.parametrize("special", [True, False])
def test_the_shortest_range_of_tokens_that_holds_the_part(kind, part, special):
    tokenizer = made()
    ids = tokenizer(TEXT, add_special_tokens=special).input_ids
    which = {"occurrence": 0} if TEXT.count(part) > 1 else {}
    start, stop = span(kind(tokenizer), TEXT, part, add_special_tokens=special, **which)
    assert part in tokenizer.decode(ids[start:stop])
    assert part not in tokenizer.decode(ids[start + 1 : stop])
    assert part not in tokenizer.decode(ids[start : stop - 1])


@pytest.mark.parametrize("kind", [lambda t: t, WithoutOffsets])
def test_one_of_several_occurrences(kind):
    tokenizer = made()
    with pytest.raises(KvfoldError, match=r"'Alice' occurs 2 times.*occurrence=0 to 1"):
        span(kind(tokenizer), TEXT, "Alice")
    first = span(kind(tokenizer), TEXT, "Alice", occurrence=0)
    second = span(kind(tokenizer), TEXT, "Alice", occurrence=1)
    ids = tokenizer(TEXT).input_ids
    assert first < second
    assert tokenizer.decode(ids[: second[0]]).count("Alice") == 1
    assert tokenizer.decode(ids[: second[1]]).count("Alice") == 2
    for missing in (2, -1):
        with pytest.raises(KvfoldError, match=f"no occurrence={missing}"):
            span(kind(tokenizer), TEXT, "Alice", occurrence=missing)


@pytest.mark.parametrize("part", ["Carol", "alice", ""])
def test_what_is_not_in_the_text_is_refused(part):
    with pytest.raises(KvfoldError, match=f"'{part}' is not in the text"):
        span(made(), TEXT, part)


def test_an_error_shows_sixty_characters_of_a_part():
    for length, shown in ((58, f"'{'x' * 58}'"), (59, f"'{'x' * 56}...")):
        with pytest.raises(KvfoldError) as refused:
            span(made(), TEXT, "x" * length)
        assert str(refused.value).startswith(f"{shown} is not") and len(shown) <= 60


def test_a_tokenizer_that_changes_the_text_is_refused():
    class Forgetful(WithoutOffsets):
        def decode(self, ids, **options):
            return super().decode(ids, **options).replace("ü", "u")

    assert span(Forgetful(made()), TEXT, "met Alice")
    with pytest.raises(KvfoldError, match="Forgetful changes the text"):
        span(Forgetful(made()), TEXT, "Zürich")


@pytest.mark.parametrize("padded", [False, True])
def test_a_found_span_is_never_evicted(padded):
    tokenizer, model = made(), build("llama", vocab_size=400)
    found = kvfold.span(tokenizer, TEXT, "Alice Müller")
    ids = torch.tensor([[0] * 5 * padded + tokenizer(TEXT).input_ids])
    mask = torch.ones_like(ids)
    mask[:, : 5 * padded] = 0
    cache = CompressedCache(model, "random", 12 + 5, protect=[found])
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    stored = cache.positions(0)[0][0].tolist()
    assert len(stored) == 17 < mask.sum()
    assert set(range(5 * padded + found[0], 5 * padded + found[1])) <= set(stored)


@pytest.mark.parametrize(
    "protect",
    [
        ["Alice"],
        "Alice",
        [("a", "b")],
        [(1, 2, 3)],
        [(1,)],
        5,
        None,
        (3, 5),
        [(0.5, 2)],
        [(5, 3)],
        [(3, 3)],
        [(-1, 3)],
        [None],
    ],
)
def test_what_is_no_list_of_spans_is_refused(protect):
    with pytest.raises(KvfoldError, match=r"protect takes a list of spans.*kvfold\.span\("):
        CompressedCache(build("llama"), "snapkv", 64, protect=protect)


def test_spans_may_be_of_numpy_or_torch():
    given = [[3, 5], (np.int64(7), torch.tensor(9)), torch.tensor([10, 12]), range(13, 15)]
    assert spans_of(given) == ((3, 5), (7, 9), (10, 12), (13, 14))


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("spans", [[(5, 5)], [(9, 3)], [(-2, 4)]])
def test_spans_that_protect_nothing_are_refused(model, spans):
    with pytest.raises(KvfoldError):
        CompressedCache(model, "knorm", 20, protect=spans)
