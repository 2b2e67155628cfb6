# SPDX-License-Identifier: Apache-2.0
"""Rows that reach their EOS while others go on: each answers its next turn as it does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.hf.models import read_tokens
from tests.helpers.models import build, continuation, prompts

LENGTHS, PADDED, STEPS = (40, 40, 40), (40, 35, 29), 30
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 6}
APPENDING = [("full", None), ("snapkv:window=8", 20), ("adakv:window=8", 20), ("simlayerkv", None)]
CHANGING = [
    ("kivi:group=8,residual=8", None),
    ("minicache:block=8,start=0", None),
    ("snapkv:window=8 + kivi:group=8,residual=8", 20),
    ("h2o", 20),
    ("tova", 20),
    ("d2o", 20),
    ("streaming_llm", 20),
    ("snapkv:window=8 + every:interval=8", 20),
]
OTHERS = [
    ("turboquant:residual=8,sinks=2,end_layers=0", None),
    ("think:queries=8,recent=8", None),
    ("roco", 20),
    ("h2o", 0.5),
    ("adakv:window=8 + every:interval=8", 20),
    ("expected_attention + every:interval=8", 20),
    ("scissorhands", 20),
    ("sirllm", 20),
    ("knorm + reindex", 20),
]
COMPILED = [*APPENDING, *CHANGING[:6], ("knorm + reindex", 20)]


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64, head_dim=16)


class Turns:
    """Prompts of three rows, and a token at which the second row's answer ends, the first's not."""

    def __init__(
        self, model: Any, spec: str, budget: float | None, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        self.model, self.spec, self.budget, self.lengths = model, spec, budget, lengths
        self.ids, self.mask = prompts(lengths)
        whole = self.first(kvfold.generate, self.cache(), eos_token_id=None)
        long, short = whole[0, 40:].tolist(), whole[1, 40:].tolist()
        self.eos = next(t for i, t in enumerate(short) if i > 3 and t not in [0, *long, *short[:i]])
        said = [row.tolist() for row in whole[:, 40:]]
        self.said = [row[: row.index(self.eos) + 1] if self.eos in row else row for row in said]

    def cache(self) -> CompressedCache:
        return CompressedCache(self.model, self.spec, self.budget)

    def first(self, generate: Any, cache: CompressedCache, **options: Any) -> Tensor:
        """The prompts and their answers `[3, N]`."""
        options = {"attention_mask": self.mask, "max_new_tokens": STEPS, **GREEDY, **options}
        if generate is kvfold.generate:
            return generate(self.model, self.ids, cache=cache, **options)
        return generate(self.ids, past_key_values=cache, **options)

    def second(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The conversations with a second message, and their mask, 0 behind an EOS."""
        whole = torch.cat([out, continuation(3, 9, seed=5)], 1)
        mask = torch.ones_like(whole)
        mask[:, :40] = self.mask
        for row, said in enumerate(self.said):
            mask[row, 40 + len(said) : out.shape[1]] = 0
        return whole, mask

    def alone(self, row: int, **options: Any) -> Tensor:
        """Logits `[6, V]` of one row's second answer in a cache of its own."""
        cache, ids = self.cache(), self.ids[row : row + 1, 40 - self.lengths[row] :]
        new = len(self.said[row])
        out = kvfold.generate(self.model, ids, cache=cache, max_new_tokens=new, **GREEDY)
        if new < STEPS:  # beside others the EOS is read as it comes
            read_tokens(self.model, out[:, -1:], cache, None)
        whole = torch.cat([out, continuation(3, 9, seed=5)[row : row + 1]], 1)
        options |= {"attention_mask": torch.ones_like(whole), **LOGITS}
        said = kvfold.generate(self.model, whole, cache=cache, **GREEDY, **options)
        return torch.cat(said.logits)

    def check(self, logits: tuple[Tensor, ...], **options: Any) -> None:
        """Asserts that the rows' second answers, of `logits [3, V]` each, are those alone."""
        for row in range(3):
            ours = torch.stack([of_step[row] for of_step in logits])
            torch.testing.assert_close(ours, self.alone(row, **options), rtol=0, atol=1e-4)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "budget"), [*APPENDING, *CHANGING, *OTHERS], ids=str)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [(LENGTHS, {}), (PADDED, {}), (PADDED, {"prefill_chunk": 4})],
    ids=["even", "padded", "padded-chunks"],
)
def test_a_row_that_ended_goes_on_as_alone(model, spec, budget, lengths, options):
    turns = Turns(model, spec, budget, lengths)
    cache = turns.cache()
    whole, mask = turns.second(turns.first(kvfold.generate, cache, eos_token_id=turns.eos))
    assert not mask[1].all()
    options = options | LOGITS | GREEDY
    out = kvfold.generate(model, whole, cache=cache, attention_mask=mask, **options)
    turns.check(out.logits, **{k: v for k, v in options.items() if k == "prefill_chunk"})


@pytest.mark.whole
@pytest.mark.parametrize(("spec", "budget"), COMPILED, ids=str)
def test_a_row_that_ended_in_a_graph_goes_on_as_alone(model, spec, budget):
    turns = Turns(model, spec, budget, PADDED)
    cache = turns.cache()
    out = turns.first(kvfold.generate, cache, eos_token_id=turns.eos, compile=True)
    whole, mask = turns.second(out)
    options = {"attention_mask": mask, "compile": True, **LOGITS, **GREEDY}
    turns.check(kvfold.generate(model, whole, cache=cache, **options).logits)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(("spec", "budget"), [*APPENDING, *CHANGING], ids=str)
@pytest.mark.parametrize("by", ["kvfold", "transformers"])
def test_padding_that_transformers_read_as_tokens_is_hidden_or_refused(model, spec, budget, by):
    """Its mask is 1 behind an EOS: no harm where tokens are only appended."""
    turns = Turns(model, spec, budget)
    cache = turns.cache()
    whole, mask = turns.second(turns.first(model.generate, cache, eos_token_id=turns.eos))

    def go_on(mask: Tensor) -> Any:
        options = {"attention_mask": mask, **LOGITS, **GREEDY}
        if by == "kvfold":
            return kvfold.generate(model, whole, cache=cache, **options)
        return model.generate(whole, past_key_values=cache, **options)

    if (spec, budget) in APPENDING:
        turns.check(go_on(mask).logits)
        return
    where = f"row 1, column {40 + len(turns.said[1])}"
    with pytest.raises(KvfoldError, match=f"{where} for padding, but it was read as a token"):
        go_on(mask)
    assert cache.get_seq_length() == 40 + STEPS - 1
    assert go_on(torch.ones_like(whole)).sequences.shape[1] == whole.shape[1] + 6


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "budget"), [("h2o", 20), ("snapkv:window=8", 20)])
def test_padding_becomes_text_only_where_all_of_it_is_stored(model, spec, budget):
    turns = Turns(model, spec, budget)
    cache, stock = turns.cache(), turns.cache()
    whole, _ = turns.second(turns.first(kvfold.generate, cache, eos_token_id=turns.eos))
    turns.first(model.generate, stock, eos_token_id=turns.eos)
    options = {"attention_mask": torch.ones_like(whole), **LOGITS, **GREEDY}
    if spec == "h2o":
        for mask in (options["attention_mask"], None):
            with pytest.raises(KvfoldError, match="for a token, but it was read as padding"):
                turn = options | {"attention_mask": mask}
                kvfold.generate(model, whole, cache=cache, **turn)
        return
    ours, read_as_text = (
        kvfold.generate(model, whole, cache=each, **options).logits for each in (cache, stock)
    )
    torch.testing.assert_close(torch.stack(ours), torch.stack(read_as_text), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_windows_count_what_follows_an_end_as_text():
    """They cannot leave it out: a conversation with them goes on from all that was read."""
    turns = Turns(build("ministral", torch.float64), "snapkv:window=8", 20)
    cache, stock = turns.cache(), turns.cache()
    whole, mask = turns.second(turns.first(kvfold.generate, cache, eos_token_id=turns.eos))
    turns.first(turns.model.generate, stock, eos_token_id=turns.eos)
    assert cache.tokens_read() is None
    with pytest.raises(KvfoldError, match="each row with a cache of its own"):
        kvfold.generate(turns.model, whole, cache=cache, attention_mask=mask, **GREEDY)
    ours, read_as_text = (
        kvfold.generate(turns.model, whole, cache=each, **LOGITS, **GREEDY).logits
        for each in (cache, stock)
    )
    assert torch.equal(torch.stack(ours), torch.stack(read_as_text))


def test_the_eos_is_the_model_s_where_a_configuration_has_none(model, monkeypatch):
    turns = Turns(model, "full", None)
    cache, config = turns.cache(), transformers.GenerationConfig(max_new_tokens=STEPS)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [turns.eos, 198])
    options = {"attention_mask": turns.mask, "generation_config": config, **GREEDY}
    kvfold.generate(model, turns.ids, cache=cache, **options)
    assert cache.tokens_read()[1].sum() == 40 + len(turns.said[1])


def test_what_followed_an_end_is_forgotten_with_it(model):
    turns = Turns(model, "full", None)
    cache = turns.cache()
    with cache.frozen():
        turns.first(kvfold.generate, cache, eos_token_id=turns.eos)
        assert not cache.tokens_read()[1].all()
        cache.crop(40 - cache.get_seq_length())
    assert cache.tokens_read() is None
    turns.first(kvfold.generate, cache, reuse="prefix", eos_token_id=turns.eos)
    assert not cache.tokens_read()[1].all()
