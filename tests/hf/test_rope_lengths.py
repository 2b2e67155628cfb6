# SPDX-License-Identifier: Apache-2.0
"""RoPE that follows the length: a text read in parts is the text read at once, or is refused."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

import kvfold
from kvfold import CompressedCache, UnsupportedModel
from kvfold.hf.rope_lengths import RopeLengths
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build, prompts

LIMIT, GREEDY = 32, {"do_sample": False, "max_new_tokens": 4}


def scaled(name, **settings):
    """A tiny model under other RoPE settings, trained for twice `LIMIT` tokens."""
    channels = build(name).config.hidden_size // build(name).config.num_attention_heads // 2
    rope = {"rope_theta": 1e4, "factor": 4.0, **settings}
    if settings["rope_type"] == "longrope":
        rope |= {"short_factor": [1.0] * channels, "long_factor": [4.0] * channels}
        rope |= {"original_max_position_embeddings": LIMIT}
    return build(name, rope_parameters=rope, max_position_embeddings=2 * LIMIT)


MODELS = {
    "phi3": longrope,
    "llama": lambda: scaled("llama", rope_type="longrope"),
    "qwen2": lambda: scaled("qwen2", rope_type="longrope"),
}
switching = pytest.mark.parametrize("name", MODELS)


@pytest.mark.cases(3)
@pytest.mark.slow
@notices_drops
@switching
@pytest.mark.parametrize(
    "how",
    [
        {"prefill_chunk": 10},
        {"prefill_chunk": 1},
        {"prefill_chunk": 10, "compress": "per_chunk"},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_a_text_in_pieces_is_the_text_at_once(name, how):
    if "prompt_lookup_num_tokens" in how and kvfold.hf.versions.INSTALLED.release < (5, 23):
        pytest.skip("refused by this transformers")
    model, (ids, _) = MODELS[name](), prompts((60,))
    expected = model.generate(ids, **GREEDY)
    got = kvfold.generate(model, ids, cache=CompressedCache(model, "full"), **how, **GREEDY)
    assert torch.equal(got, expected)


@notices_drops
@switching
def test_a_turn_past_the_change_reads_the_whole_text_anew(name):
    model, (ids, _) = MODELS[name](), prompts((60,))
    cache = CompressedCache(model, "full")
    said = kvfold.generate(model, ids[:, :16], cache=cache, **GREEDY)
    whole = torch.cat([said, ids[:, 20:]], 1)
    expected = model.generate(whole, **GREEDY)
    assert torch.equal(kvfold.generate(model, whole, cache=cache, **GREEDY), expected)
    assert cache.get_seq_length() == 63


@notices_drops
@switching
def test_a_turn_past_the_change_is_refused_where_entries_were_evicted(name):
    model, (ids, _) = MODELS[name](), prompts((60,))
    cache = CompressedCache(model, "snapkv:window=4", 8)
    said = kvfold.generate(model, ids[:, :16], cache=cache, **GREEDY)
    with pytest.raises(UnsupportedModel, match="past 32 tokens: the 19 tokens in the cache"):
        kvfold.generate(model, torch.cat([said, ids[:, 20:]], 1), cache=cache, **GREEDY)
    assert cache.get_seq_length() == 19


@pytest.mark.slow
@notices_drops
@switching
@pytest.mark.parametrize("seen", [1, LIMIT])
@torch.no_grad()
def test_a_forward_past_the_change_is_refused(name, seen):
    """Also of embeddings, and of single steps: whoever calls the model."""
    model, (ids, _) = MODELS[name](), prompts((60,))
    cache = CompressedCache(model, "full")
    model(ids[:, :seen], past_key_values=cache)
    rest = ids[:, seen:] if seen == 1 else ids[:, seen : seen + 1]
    for given in ({"input_ids": rest}, {"inputs_embeds": model.get_input_embeddings()(rest)}):
        with pytest.raises(UnsupportedModel, match="read the whole text into a new cache"):
            model(**given, past_key_values=cache)
    assert cache.get_seq_length() == seen


@notices_drops
@switching
@torch.no_grad()
def test_what_a_longer_text_left_in_a_cropped_cache_is_read_anew_or_refused(name):
    """Its first tokens keep the rotation of the longer text."""
    model, (ids, _), (others, _) = MODELS[name](), prompts((60,)), prompts((15,), seed=5)
    cache, text = CompressedCache(model, "full"), torch.cat([ids[:, :10], others], 1)
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    got = kvfold.generate(model, text, cache=cache, reuse="prefix", **GREEDY)
    assert torch.equal(got, model.generate(text, **GREEDY))
    cache.reset()
    model(ids, past_key_values=cache)
    cache.crop(LIMIT - 60)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    for each in copies:
        model(ids[:, LIMIT : LIMIT + 1], past_key_values=each)  # as long as it was read for
        each.crop(10 - each.get_seq_length())
        with pytest.raises(UnsupportedModel, match=r"the 10 tokens in the cache .* longer texts"):
            model(others, past_key_values=each)


@notices_drops
@torch.no_grad()
def test_padding_counts_for_no_position():
    """All rows are padded: their texts pass the change after their columns do."""
    model = longrope()
    ids, mask = prompts((30, 26))
    ids, mask = (torch.nn.functional.pad(each, (6, 0)) for each in (ids, mask))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = CompressedCache(model, "full")
    model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
    assert cache.get_seq_length() == 36
    with pytest.raises(UnsupportedModel, match="the 30 tokens in the cache"):
        model(ids[:, :4], past_key_values=cache, position_ids=places[:, -1:] + torch.arange(1, 5))


def test_texts_that_grow_under_dynamic_ntk_are_refused():
    model, (ids, _) = scaled("llama", rope_type="dynamic"), prompts((70,))
    for length, options in ((70, {}), (62, {}), (70, {"prefill_chunk": 20})):
        cache = CompressedCache(model, "full")
        with pytest.raises(UnsupportedModel, match="dynamic NTK"):
            kvfold.generate(model, ids[:, :length], cache=cache, allow_longer=True, **options)
        assert cache.get_seq_length() == 0
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="dynamic NTK"):
        model(ids, past_key_values=CompressedCache(model, "full"))


@torch.no_grad()
def test_another_longer_text_leaves_no_mark_under_dynamic_ntk():
    model, (ids, _) = scaled("llama", rope_type="dynamic"), prompts((100,))
    short = ids[:, : 2 * LIMIT - 1]
    expected = scaled("llama", rope_type="dynamic")(short).logits
    model(ids)  # frequencies lie in the module
    for pieces in ([short], short.split(20, 1)):
        cache = CompressedCache(model, "full")
        logits = [model(piece, past_key_values=cache).logits for piece in pieces]
        torch.testing.assert_close(torch.cat(logits, 1), expected, atol=2e-5, rtol=0)


def test_one_thread_at_a_time_rotates():
    """A long text of another thread would change the frequencies between two lines."""
    model = MODELS["llama"]()
    CompressedCache(model, "full")
    rotary, short, inside = model.model.rotary_emb, torch.arange(20)[None], threading.Event()
    expected = rotary(torch.zeros(1), short)[0].clone()
    blocked = threading.Thread(target=lambda: rotary(torch.zeros(1), torch.arange(60)[None]))

    def while_rotating(module, args):
        handle.remove()
        inside.set()
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive()

    handle = rotary.register_forward_pre_hook(while_rotating)
    got = rotary(torch.zeros(1), short)[0]
    blocked.join()
    assert inside.is_set() and torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_other_kinds_of_rope_read_any_parts_alike(kind):
    settings = {"rope_type": kind}
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        settings |= {"original_max_position_embeddings": LIMIT}
    model, (ids, _) = scaled("llama", **settings), prompts((60,))
    assert RopeLengths.of(model) is None
    cache, expected = CompressedCache(model, "full"), model.generate(ids, **GREEDY)
    said = kvfold.generate(model, ids[:, :16], cache=cache, **GREEDY)
    cache.crop(16 - said.shape[1] + 1)
    got = kvfold.generate(model, ids, cache=cache, prefill_chunk=10, **GREEDY)
    assert torch.equal(got, expected)
