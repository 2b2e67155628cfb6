# SPDX-License-Identifier: Apache-2.0
"""SirLLM: what stays after each prompt by hand, in float64; copies, files, forks and crops."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, UnsupportedModel
from kvfold.cache.fork import fork
from kvfold.contexts.session import Session
from kvfold.methods.observation import Observation
from kvfold.methods.sirllm import surprising_then_newest
from kvfold.observers.surprise import PromptTokens, SurpriseNeed
from kvfold.policies.method_policy import policy
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    SINKS,
    ByHand,
    assert_holds,
    best,
    distinct_prompts,
    prompt_read,
    read_by_kvfold,
)
from tests.helpers.caches import ask, decode, positions, same, start
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader, rotated
from tests.helpers.turns import turn

SPEC = "sirllm:recent=0.25,decay=0.5"
RECENT, DECAY = 0.25, 0.5


# --- by hand -------------------------------------------------------------------------------------


class Turns:
    """One row read by hand: numbers of its tokens, and what stays when a prompt has ended."""

    def __init__(self, one: ByHand, ids: list[int]) -> None:
        self.one, self.numbers, self.next = one, [], None
        self.note(ids, prompt=True)

    def read(self, ids: Tensor) -> None:
        self.one(ids)
        self.note(ids[0].tolist(), prompt=ids.shape[1] > 1)

    def note(self, ids: list[int], prompt: bool) -> None:
        probabilities = self.one.logits.softmax(-1)
        before = [self.next, *probabilities[:-1]]
        new = [0.0 if p is None else -float(p[i].log()) for p, i in zip(before, ids, strict=True)]
        self.next = probabilities[-1]
        if prompt:
            new[0] = max(new[1:])
            self.numbers = [DECAY * number for number in self.numbers]
        self.numbers += new
        if prompt:
            for layer in self.one.layers:
                for head in layer.heads:
                    self.evict(head, len(ids))

    def evict(self, head, new: int) -> None:
        if len(head) <= SMALL:
            return
        old = head.places if hasattr(head, "places") else []
        places = old + list(range(self.one.seen - len(head) + len(old), self.one.seen))
        kept = sorted(self.kept(head.positions, new))
        slots = [head.positions.index(position) for position in kept]
        head.keep(slots)
        head.places = list(range(self.one.seen - len(kept), self.one.seen))
        by = torch.tensor([at - places[slot] for at, slot in zip(head.places, slots, strict=True)])
        head.keys = rotated(head.keys[None, None], by[None, None])[0, 0]

    def kept(self, stored: list[int], new: int) -> list[int]:
        """The sinks, the N best or the whole prompt among them, and the newest R of the others."""
        room = SMALL - SINKS
        newest = int(RECENT * room)
        most = room - newest
        open_ = [position for position in stored if position >= SINKS]
        prompt = [position for position in open_ if position >= self.one.seen - new]
        sure = prompt if len(prompt) <= most else []
        rest = [position for position in open_ if position not in sure]
        chosen = best([self.numbers[position] for position in rest], most - len(sure))
        sure = sure + [rest[place] for place in chosen]
        others = [position for position in open_ if position not in sure]
        return list(range(SINKS)) + sure + others[len(others) - newest :]


@pytest.mark.cases(2)
@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("later", [9, 14], ids=["fits", "competes"])
def test_turns_by_hand(heads, lengths, later) -> None:
    """Prompts of 9 tokens fit into the 12 best, those of 14 do not."""
    longest, rows = max(lengths), len(lengths)
    ids = distinct_prompts((longest + 3 * (later + 4),) * rows)[0][:, longest:]
    pieces = [piece for turn in ids.chunk(3, 1) for piece in turn.split([later, 1, 1, 1, 1], 1)]
    reader = read_by_kvfold(SPEC, SMALL, heads, lengths)
    first = distinct_prompts(lengths)[0]
    expected = [
        Turns(
            copy.deepcopy(prompt_read(heads, lengths, row)), first[row, longest - length :].tolist()
        )
        for row, length in enumerate(lengths)
    ]
    assert_holds(reader.cache, [turns.one for turns in expected])
    for piece in pieces:
        reader(piece)
        for row, turns in enumerate(expected):
            turns.read(piece[row : row + 1])
        assert_holds(reader.cache, [turns.one for turns in expected])


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("chunk", [7, 20])
def test_a_prompt_in_pieces_is_the_whole_prompt(heads, lengths, chunk) -> None:
    whole = read_by_kvfold(SPEC, SMALL, heads, lengths).cache
    pieces = read_by_kvfold(SPEC, SMALL, heads, lengths, chunk).cache
    assert positions(pieces) == positions(whole)
    torch.testing.assert_close(
        pieces.phase.logs[SurpriseNeed].known.numbers, whole.phase.logs[SurpriseNeed].known.numbers
    )


def test_the_selection_on_given_numbers() -> None:
    """4 sinks, the 2 best of 12 entries, the 2 newest of the others; then with a prompt of 2."""
    scores = torch.tensor([9.0, 0, 0, 0, 1, 5, 1, 2, 3, 1, 1, 4])[None, None]
    at = torch.arange(12)[None, None]
    forced, counts = at < 4, torch.tensor([[8]])
    for prompt, expected in [(0, [5, 11, 9, 10]), (2, [10, 11, 8, 9]), (3, [5, 11, 9, 10])]:
        seen = Observation(
            scores[..., None],
            scores[..., None],
            at,
            tokens_seen=torch.tensor([12]),
            observed={PromptTokens: torch.tensor([prompt])},
        )
        slots = surprising_then_newest(seen, scores, forced, at, counts, recent=0.5)
        assert slots[0, 0].tolist() == sorted([0, 1, 2, 3, *expected])


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_padded_later_turn_are_those_alone(seed, chunk) -> None:
    """The unread last token of the answer, padding, and a shorter message."""
    model = build("llama", torch.float64)
    draw = torch.Generator().manual_seed(seed)
    prompt, message = (torch.randint(3, 199, (2, n), generator=draw) for n in (20, 14))
    padded = message.clone()
    padded[1, :4] = 0
    options = {"max_new_tokens": 3, "suppress_tokens": [0], "prefill_chunk": chunk}

    def kept(rows: slice, message: Tensor) -> list[Tensor]:
        """Positions that the last row keeps in each layer, counted without padding."""
        cache = kvfold.CompressedCache(model, SPEC, 12)
        said = turn(model, cache, prompt[rows], **options)
        mask = torch.cat([torch.ones_like(said), (message != 0).long()], 1)
        turn(model, cache, torch.cat([said, message], 1), attention_mask=mask, **options)
        places = torch.cat([mask[-1], torch.ones(3)]).long().cumsum(0) - 1
        layers = range(len(cache.layers))
        return [places[head] for layer in layers for head in cache.positions(layer)[-1]]

    assert same(kept(slice(0, 2), padded), kept(slice(1, 2), message[1:, 4:]))


# --- state that goes along -----------------------------------------------------------------------


def turns_of(reader: Reader) -> list[Tensor]:
    """Logits of two more prompts and the tokens after each."""
    rows, found = len(reader.cache.positions(0)), []
    for seed in range(2):
        found += [reader(continuation(rows, 9, seed=seed)), *decode(reader, 4, seed=seed)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 5])
def test_a_copy_and_a_file_go_on_alike(tmp_path: Path, steps: int) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, 40)
    reader = Reader(model, context.cache)
    reader.started = True
    twin = Reader(model, copy.deepcopy(context.cache))
    words = torch.randint(3, 12, (1, steps), generator=torch.Generator().manual_seed(0))
    context.save(tmp_path / "a.kvfold")
    loaded = Reader(model, kvfold.load(tmp_path / "a.kvfold", model, tokenizer).cache)
    questions = torch.randint(3, 12, (2, 1, 9), generator=torch.Generator().manual_seed(1))
    for one in (reader, twin, loaded):
        one.found = [one(word) for word in words.split(1, 1)] if steps else []
        for question in questions:
            one.found += [one(question), one(question[:, :1])]
        assert same(one.found, reader.found)
        assert positions(one.cache) == positions(reader.cache)


def test_a_question_that_is_taken_back_changes_nothing(model) -> None:
    reader, untouched = (start(model, SPEC, (64, 53, 24)) for _ in range(2))
    for one in (reader, untouched):
        decode(one, 3)
    ask(reader, seed=1)
    assert same(turns_of(reader), turns_of(untouched))
    assert positions(reader.cache) == positions(untouched.cache)


def test_drafts_that_are_taken_back_change_nothing(model) -> None:
    """Assisted decoding: 6 tokens are read at once, and 3 of them given back."""
    drafted, straight = start(model, SPEC), start(model, SPEC)
    tokens = continuation(1, 6)
    with drafted.cache.frozen():
        drafted(tokens)
        drafted.cache.crop(-3)
    for token in tokens[:, :3].split(1, 1):
        straight(token)
    found = [one.cache.phase.logs[SurpriseNeed].known.numbers for one in (drafted, straight)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    assert len(turns_of(drafted)) == len(turns_of(straight))
    assert positions(drafted.cache) == positions(straight.cache)


def test_a_fork_reads_no_logits(model) -> None:
    cache = start(model, SPEC).cache
    reader = fork(cache)
    assert not reader.phase.logs and not reader.reads_logits
    with torch.no_grad():
        model(continuation(1, 9), past_key_values=reader)
    assert len(cache.phase.logs[SurpriseNeed].known) == 64


def test_an_edit_moves_the_numbers(model) -> None:
    cache = start(model, SPEC, budget=60).cache
    before = cache.phase.logs[SurpriseNeed].known.numbers.clone()
    cache.drop((10, 17))
    expected = torch.cat([before[:, :10], before[:, 17:]], 1)
    assert torch.equal(cache.phase.logs[SurpriseNeed].known.numbers, expected)
    with pytest.raises(KvfoldError, match="read apart"):
        cache.replace((10, 17), torch.ones(1, 2).long())


def test_chats_and_sessions_go_on() -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "sirllm", 40)
    chat = context.chat(budget=30)
    assert chat.ask(QUESTION, max_new_tokens=4) and chat.ask(QUESTION, max_new_tokens=4)
    session = Session(context)
    for _ in range(6):
        session.ask(QUESTION, max_new_tokens=4)
    assert len(session.cache.phase.logs[SurpriseNeed].known) == session.cache.get_seq_length()


# --- logits --------------------------------------------------------------------------------------


def test_the_caller_gets_the_logits_that_it_asked_for(model) -> None:
    ids = prompts((64,))[0]
    with torch.no_grad():
        expected = model(ids).logits
        for keep in (1, 3, 0, torch.tensor([0, 5])):
            cache = kvfold.CompressedCache(model, "sirllm", 100)
            found = model(ids, past_key_values=cache, logits_to_keep=keep).logits
            wanted = expected[:, keep] if isinstance(keep, Tensor) else expected[:, -keep:]
            torch.testing.assert_close(found, wanted)


def test_a_forward_that_failed_leaves_no_choice_of_logits(model) -> None:
    ids, cache = prompts((64,))[0], kvfold.CompressedCache(model, "sirllm", 100)
    with torch.no_grad():
        handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache, logits_to_keep=1)
        handle.remove()
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_others_read_no_logits(model) -> None:
    cache = start(model, "snapkv:window=8").cache
    assert not cache.reads_logits
    assert not cache.phase.logs and cache.phase.incoming is None


def test_what_gives_no_logits_is_refused(model) -> None:
    ids = prompts((64,))[0]
    with torch.no_grad():
        cache = kvfold.CompressedCache(model, "sirllm", SMALL)
        with pytest.raises(UnsupportedModel, match="past the model"):
            model.model(ids, past_key_values=cache)
        cache = kvfold.CompressedCache(model, "sirllm", SMALL)
        with pytest.raises(UnsupportedModel, match="no logits"):
            model(ids, past_key_values=cache, return_dict=False)
        cache = kvfold.CompressedCache(model, "sirllm", SMALL)
        with pytest.raises(KvfoldError, match="give input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
    with pytest.raises(KvfoldError, match="model's logits"):
        policy("sirllm")


def test_compiled_decoding_is_refused() -> None:
    model = build("llama")
    cache = kvfold.CompressedCache(model, "sirllm", SMALL)
    with pytest.raises(KvfoldError, match="reads the logits"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, compile=True, max_new_tokens=4)


@pytest.mark.parametrize("options", ["sinks=-1", "recent=1.1", "decay=-0.1", "decay=nan"])
def test_options_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(KvfoldError, match=rf"sirllm:{options.partition('=')[0]} is .*, not "):
        kvfold.parse(f"sirllm:{options}")
