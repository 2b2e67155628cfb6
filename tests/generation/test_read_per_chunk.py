# SPDX-License-Identifier: Apache-2.0
"""A prompt that is compressed piece by piece: what is kept, what is held on the way, refusals."""

import pytest
import torch

import kvfold
from kvfold.cache.state import LayerState
from kvfold.generation.reading import read_per_chunk
from kvfold.methods.base import Across
from kvfold.methods.stages.when import Once
from tests.helpers.budgets import COMPRESSING, needs_driver, reads_logits
from tests.helpers.models import build, prompts
from tests.helpers.truth import MaskedDense, Reader

CHUNK = 24
SPECS = [
    spec
    for spec in COMPRESSING
    if not needs_driver(spec) and not isinstance(kvfold.parse(spec).stages().when, Once)
]


def read(model, cache, lengths):
    ids, mask = prompts(lengths)
    with torch.no_grad():
        read_per_chunk(model, cache, ids, mask, CHUNK)
    return ids, mask


@pytest.mark.slow
@pytest.mark.cases(6)
@torch.no_grad()
@pytest.mark.parametrize("lengths", [(64,), (64, 53, 24)], ids=["alone", "padded"])
@pytest.mark.parametrize("spec", SPECS)
def test_pieces_are_turns(spec, lengths):
    """64 tokens in pieces of 21, 21 and 22: as three forwards that end a turn each."""
    model = build("llama", dtype=torch.float64)
    cache, turns = (kvfold.CompressedCache(model, spec, 20) for _ in range(2))
    ids, mask = read(model, cache, lengths)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for start, end in ((0, 21), (21, 42), (42, 64)):
        model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=places[:, start:end],
            past_key_values=turns,
        )
    assert cache.stats().per_chunk == CHUNK and turns.stats().per_chunk is None
    for layer in range(len(cache.states)):
        for one, other in zip(cache.positions(layer), turns.positions(layer), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "knorm", "streaming_llm_original"])
def test_what_is_kept_is_attended_to_as_in_a_masked_dense_cache(spec):
    """The last piece sees what the pieces before it have left, and nothing else."""
    model = build("llama", dtype=torch.float64)
    cache = kvfold.CompressedCache(model, spec, 20)
    reader, truth = Reader(model, cache), MaskedDense(build("llama", dtype=torch.float64))
    ids, _ = prompts((64,))
    for start, end in ((0, 21), (21, 42), (42, 64)):
        torch.testing.assert_close(
            reader(ids[:, start:end]), truth(ids[:, start:end]), rtol=0, atol=1e-6
        )
        truth.hide(cache)


@pytest.mark.slow
@pytest.mark.cases(1)
@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_no_more_is_held_than_a_piece_and_what_is_kept(spec, monkeypatch):
    """Entries of all layers at any time; a piece of each where layers evict together."""
    model = build("llama", dtype=torch.float64)
    cache = kvfold.CompressedCache(model, spec, 20)
    most, append = 0, LayerState.append

    def counting(state, *args):
        nonlocal most
        out = append(state, *args)
        stores = [other.store for other in cache.states if other.store is not None]
        most = max(most, sum(store.length for store in stores))
        return out

    monkeypatch.setattr(LayerState, "append", counting)
    ids = torch.randint(5, 190, (1, 400), generator=torch.Generator().manual_seed(0))
    read_per_chunk(model, cache, ids, None, CHUNK)
    stages, layers = kvfold.parse(spec).stages(), len(cache.states)
    together = (
        isinstance(stages.allocate, Across) or isinstance(stages.shape, str) or reads_logits(spec)
    )
    kept = sum(max(head for row in layer for head in row) for layer in cache.stats().kept)
    # Sizes of layers and heads shift a little from piece to piece.
    assert most <= 1.3 * kept + CHUNK * (layers if together else 1) < 400


@torch.no_grad()
def test_generate_reads_the_last_piece_itself():
    model = build("llama", dtype=torch.float64)
    caches = [kvfold.CompressedCache(model, "snapkv:window=8", 20) for _ in range(2)]
    ids, mask = prompts((64,))
    options = {"max_new_tokens": 5, "do_sample": False}
    out = kvfold.generate(
        model, ids, cache=caches[0], prefill_chunk=CHUNK, compress="per_chunk", **options
    )
    read_per_chunk(model, caches[1], ids[:, :42], mask[:, :42], CHUNK)
    expected = kvfold.generate(model, ids, cache=caches[1], **options)
    assert torch.equal(out, expected)
    assert caches[0].stats() == caches[1].stats() and caches[0].stats().per_chunk == CHUNK
    whole = kvfold.CompressedCache(model, "snapkv:window=8", 20)
    kvfold.generate(model, ids, cache=whole, prefill_chunk=CHUNK, **options)
    assert whole.stats().per_chunk is None
    assert whole.positions(0)[0][0].tolist() != caches[0].positions(0)[0][0].tolist()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "adakv:window=8"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_pieces_of_a_token_end_within_the_budget(spec, chunk):
    """Also the last one, which `generate` reads."""
    model = build("llama")
    caches = [kvfold.CompressedCache(model, spec, 20) for _ in range(2)]
    ids = prompts((41,))[0]
    options = {"compress": "per_chunk", "prefill_chunk": chunk, "do_sample": False}
    kvfold.generate(model, ids, cache=caches[0], max_new_tokens=1, **options)
    with torch.no_grad():
        read_per_chunk(model, caches[1], ids, None, chunk)
    assert caches[0].stats().kept == caches[1].stats().kept
    assert caches[0].stats().later == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("pyramidinfer", "between the layers"),
        ("simlayerkv:when=first_decode", "first token is generated"),
    ],
)
def test_methods_that_need_the_whole_prompt_are_refused(spec, reason):
    model = build("llama")
    cache = kvfold.CompressedCache(model, spec)
    ids, mask = prompts((64,))
    with pytest.raises(kvfold.KvfoldError, match=reason):
        kvfold.generate(
            model, ids, cache=cache, attention_mask=mask, prefill_chunk=8, compress="per_chunk"
        )
    assert cache.get_seq_length() == 0


def test_a_piece_must_have_a_length():
    model = build("llama")
    cache = kvfold.CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(kvfold.KvfoldError, match="prefill_chunk="):
        kvfold.generate(model, prompts((64,))[0], cache=cache, compress="per_chunk")
