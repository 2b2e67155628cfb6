# SPDX-License-Identifier: Apache-2.0
"""`LMCacheEdit` between LMCache's retrieve and store: its own streams, contexts and server."""

from __future__ import annotations

import sys

import lmcache.sdk as sdk
import pytest
import torch
from lmcache.sdk.request import LMCacheRequestStream, TokenEvent
from safetensors.torch import save_file

from kvfold.errors import KvfoldError
from kvfold.fitted.file import CHECKSUM, FORMAT, HEADER, VERSION, ScorerHeader
from kvfold.hf.header import ModelHeader, RopeHeader, digest, digest_of
from kvfold.policies import Rope, SharingLoss
from kvfold.policies.lmcache import LMCacheEdit
from tests_lmcache.engine import (
    CHUNK,
    HEADS,
    KV,
    LAYERS,
    QUERY,
    SIZE,
    Prompt,
    contexts,
    fill,
)

TOKENS, TAIL = 9 * CHUNK, 5
ROPE = Rope.plain(SIZE)


@pytest.fixture(scope="session")
def zap(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of zap with random weights, in a file as `kvfold fit` writes it."""
    path, features = tmp_path_factory.mktemp("fit") / "scorer.safetensors", 2 * SIZE + 3
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "weights": torch.randn(LAYERS, HEADS, features, generator=draw),
        "scales": torch.ones(LAYERS, HEADS, features),
        "projections": torch.zeros(features, 0),
        "rope.rotary_emb.inv_freq": ROPE.frequencies,
    }
    header = ScorerHeader(
        written_by="",
        target="kvzip",
        texts=0,
        dtype="float32",
        model=ModelHeader(name="", config={}, config_hash="", weights="", vocabulary=""),
        rope=RopeHeader(parameters={}, scaling={}, moved=0),
        checksums={name: digest_of(tensor) for name, tensor in tensors.items()},
    ).model_dump_json()
    about = {FORMAT: VERSION, HEADER: header, CHECKSUM: digest(VERSION + header)}
    save_file(tensors, path, about)
    return f"zap:file={path}"


def edit_of(method: str, budget: float = 0.5, **options: object) -> LMCacheEdit:
    return LMCacheEdit(method, budget, head_size=SIZE, rope=ROPE, chunk=CHUNK, **options)


def stream_of(both: tuple, prompt: Prompt, salt: str = "") -> LMCacheRequestStream:
    """A request whose engine generates one token, and says which prompt it was asked for."""

    def engine(prompt_token_ids, sampling_params, cache_salt):
        asked.append(list(prompt_token_ids))
        yield TokenEvent(7)

    stream = sdk.request.create_request(both, engine, prompt.ids, salt)
    stream.asked = asked = []
    return stream


@pytest.mark.parametrize(
    "method", ["snapkv:window=8", "rkv", "keydiff", "expected_attention", "zap"]
)
def test_a_request_goes_on_with_the_edited_tokens(server, zap: str, method: str) -> None:
    edit = edit_of(zap if method == "zap" else method)
    seed = sum(map(ord, method))
    prompt = Prompt.random(TOKENS + TAIL, seed)
    with contexts(server) as both:
        fill(*both, prompt)
        stream = stream_of(both, prompt)
        stream.modify_kv(edit, timeout=10)
        stored = both[0].retrieve(stream.tokens)
    kv, ids = prompt.kv[:, :, :TOKENS], prompt.ids[:TOKENS]
    expected, left = edit({KV: kv, QUERY: prompt.queries[None, :, :TOKENS]}, ids)
    assert stream.tokens == left and len(left) == 4 * CHUNK
    assert torch.equal(stored, expected)
    # What the engine reads next is what was kept, and the tokens that filled no chunk.
    stream.generate({"max_tokens": 1})
    assert stream.asked == [left + prompt.ids[TOKENS:]]


def test_a_batch_is_edited_in_threads_as_each_request_alone(server) -> None:
    reports: list[SharingLoss] = []
    edit = edit_of("snapkv:window=8", on_report=reports.append)
    prompts = [Prompt.random(TOKENS, seed) for seed in (1, 2, 3, 4)]
    with contexts(server) as both:
        batch = sdk.batch.LMCacheBatchedStream()
        for prompt in prompts:
            fill(*both, prompt)
            batch.add(stream_of(both, prompt))
        batch.modify(edit, timeout=10)
        streams = list(batch.request_streams.values())
        stored = [both[0].retrieve(stream.tokens) for stream in streams]
    alone = edit_of("snapkv:window=8")
    for prompt, stream, there in zip(prompts, streams, stored, strict=True):
        kv, ids = alone({KV: prompt.kv, QUERY: prompt.queries}, prompt.ids)
        assert stream.tokens == ids and torch.equal(there, kv)
    assert len(reports) == 4
    assert all(0 < each.mass_shared < each.mass_own < 1 for each in reports)


def test_a_salt_hides_the_edited_tokens_from_other_requests(server) -> None:
    prompt = Prompt.random(TOKENS, 5)
    with contexts(server) as both:
        fill(*both, prompt, salt="compressed")
        stream = stream_of(both, prompt, salt="compressed")
        stream.modify_kv(edit_of("keydiff"), timeout=10)
        assert both[0].retrieve(stream.tokens, cache_salt="compressed") is not None
        assert both[0].retrieve(stream.tokens) is None


def test_missing_queries_are_named_and_nothing_is_stored(server) -> None:
    prompt = Prompt.random(TOKENS, 6)
    with contexts(server) as both:
        fill(*both, prompt)
        stream = stream_of(both[:1], prompt)
        with pytest.raises(KvfoldError, match=r"lmcache\.sdk\.qcache"):
            stream.modify_kv(edit_of("snapkv:window=8"), timeout=10)
        assert stream.tokens == prompt.ids
        assert torch.equal(both[0].retrieve(prompt.ids), prompt.kv)


def test_nothing_here_imports_transformers() -> None:
    assert not {name for name in sys.modules if name.split(".")[0] == "transformers"}
