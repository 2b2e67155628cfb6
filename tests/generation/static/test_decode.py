# SPDX-License-Identifier: Apache-2.0
"""compile=True changes how long a token takes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.cache.fork import fork
from kvfold.cache.layer import CompressedLayer
from kvfold.generation.static import ragged as segments
from kvfold.kernels.quantized import attend_to_packed_segments, reads_packed
from kvfold.kernels.reference import attend_with_column_sums
from kvfold.kernels.static_buffers import attend_to_buffers
from kvfold.store.buffer import GrowingBuffer
from kvfold.store.dense import DenseStore
from kvfold.store.quantized import Packing
from kvfold.store.ragged import RaggedStore
from tests.helpers.budgets import NAMED, compressed
from tests.helpers.models import build, continuation, prompts

# Each graph takes seconds to compile.
pytestmark = pytest.mark.slow

ALONE, PADDED = (64,), (64, 53, 24)
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
DENSE = ["snapkv:window=8", "pyramidkv:window=8", "knorm", "full"]
RAGGED = "adakv:window=8"
ENCODED = [
    "snapkv:window=8 + kivi:group=8,residual=8",
    "think:queries=8,recent=8",
    "minicache:block=8",
]
HOLDING = ["h2o", "tova", "d2o", "d2o:decide=head_mean", "roco", "streaming_llm_original"]
# One graph without breaks, whose operations run one by one: quick to make.
ONE_GRAPH = {"compile_config": CompileConfig(fullgraph=True, backend="eager", mode=None)}
COMPILED = {"compile": True, **ONE_GRAPH}
GREEDY = {"do_sample": False, "max_new_tokens": 12}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def small(name: str, **changes: Any) -> Any:
    return build(name, num_hidden_layers=2, **changes)


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def family(request):
    torch._dynamo.reset()  # at most eight graphs at a time
    return small(request.param)


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    return small("llama")


def graphs() -> int:
    """Graphs made since the counters were cleared, which must be whole."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def both(model: Any, spec: str, lengths: tuple[int, ...] = ALONE, **options: Any) -> Any:
    """Outputs and caches of the same prompts, eager and compiled."""
    ids, mask = prompts(lengths)
    caches = compressed(model, spec), compressed(model, spec)
    if not {"max_length", "generation_config"} & options.keys():
        options = {**GREEDY, **options}
    outs = [
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **how, **options)
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    return outs, caches


def where(cache: CompressedCache) -> list[Any]:
    """Kept positions, as plain lists."""
    layers = range(len(cache.states))
    return [[[h.tolist() for h in row] for row in cache.positions(i)] for i in layers]


def check_same(eager: CompressedCache, compiled: CompressedCache) -> None:
    for layer in (*eager.states, *compiled.states):
        if isinstance(layer.store, DenseStore) and layer.store.dead:
            layer.copy_alive()  # one may be further from the next time than the other
    assert compiled.get_seq_length() == eager.get_seq_length()
    assert where(compiled) == where(eager)
    mine, theirs = compiled.stats(), eager.stats()
    for size in ("kv_bytes", "position_bytes", "state_bytes", "nbytes_full", "seen_per_row"):
        assert getattr(mine, size) == getattr(theirs, size)
    for one, other in zip(eager.states, compiled.states, strict=True):
        entries = other.columns()[..., None] >= 0
        for a, b in zip(one.stored().dense(), other.stored().dense(), strict=True):
            torch.testing.assert_close(a * entries, b * entries, atol=1e-5, rtol=1e-5)
        for name in ("sums", "squares", "merging", "capacity"):
            of_one, of_other = getattr(one, name), getattr(other, name)
            torch.testing.assert_close(of_other, of_one, atol=1e-5, rtol=1e-5)
        for name in ("surplus", "turns", "evicted_at"):
            assert getattr(other, name) == getattr(one, name)


# --- the same tokens -------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("spec", [*DENSE, RAGGED, *ENCODED, *HOLDING])
def test_tokens_logits_and_cache_are_those_of_eager_decoding(family, spec, lengths):
    outs, caches = both(family, spec, lengths, **LOGITS)
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6)
    assert outs[1].past_key_values is caches[1]
    check_same(*caches)


@pytest.mark.parametrize("spec", ["snapkv:window=8", RAGGED, *ENCODED, "h2o", "d2o"])
def test_the_next_turn_is_that_of_eager_decoding(family, spec):
    outs, caches = both(family, spec)
    for seed, how in enumerate(({}, COMPILED)):  # the second compiled turn follows an eager one
        text = torch.cat([outs[0], continuation(1, 20, seed)], 1)
        mask = torch.ones_like(text)
        outs = [
            kvfold.generate(family, text, cache=cache, attention_mask=mask, **options, **GREEDY)
            for cache, options in zip(caches, ({}, how), strict=True)
        ]
        assert torch.equal(*outs)
        check_same(*caches)


def test_every_method_decodes_the_same_or_is_refused(model):
    refusing, evicting = [], set()
    for spec in (spec for spec in NAMED if not spec.startswith("kvzip")):  # needs a tokenizer
        try:
            outs, caches = both(model, spec)
        except KvfoldError:
            refusing.append(spec.split(":")[0].split("_")[0])
            continue
        assert torch.equal(*outs)
        check_same(*caches)
        stages = caches[0].method.stages()
        if stages.decode == "hold":
            evicting.add(repr((stages.score, stages.merge_one)))
    # Beside those that evict: one for rectangles, one for segments, two products with packed ones.
    assert graphs() == 4 + len(evicting)
    assert set(refusing) == {"cam", "streaming"}


@pytest.mark.parametrize("lengths", [ALONE, PADDED])
def test_layers_without_a_limit_decode_beside_those_that_hold_one(model, lengths):
    ids, mask = prompts(lengths)
    caches = [compressed(model, "d2o_official:skip_layers=0", 0.3) for _ in range(2)]
    outs = [
        kvfold.generate(
            model, ids, cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=20, **how
        )
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    assert torch.equal(*outs)
    # Where nothing leaves, padding is still stored, which a graph does not hand back.
    assert where(caches[0]) == where(caches[1])
    assert len({len(caches[0].positions(layer)[0][0]) for layer in range(2)}) == 2


@BATCHES
@pytest.mark.parametrize("budget", [20, 70, 200])
@pytest.mark.parametrize("spec", HOLDING)
def test_entries_leave_as_they_do_eagerly(model, spec, lengths, budget):
    """From when the budget is full, and however often what stays is moved together."""
    ids, mask = prompts(lengths)
    caches = compressed(model, spec, budget), compressed(model, spec, budget)
    outs = [
        kvfold.generate(
            model, ids, cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=70, **how
        )
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    assert torch.equal(*outs)
    if lengths == PADDED and budget == 200:
        # Where nothing leaves, padding is still stored, which a graph does not hand back.
        assert where(caches[0]) == where(caches[1])
    else:
        check_same(*caches)
    assert all(layer.stored().dead == 0 for layer in caches[1].states)


@pytest.mark.parametrize("spec", ["kivi:group=8,residual=8", *ENCODED[1:]])
def test_nothing_may_be_encoded_when_decoding_begins(model, spec):
    ids = prompts((6,))[0]
    caches = [CompressedCache(model, spec) for _ in range(2)]
    outs = [
        kvfold.generate(model, ids, cache=cache, do_sample=False, max_new_tokens=40, **how)
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    assert torch.equal(*outs)
    check_same(*caches)


def test_what_is_protected_does_not_leave(model):
    ids = prompts(ALONE)[0]
    caches = [CompressedCache(model, "tova", 12, protect=[(0, 9)]) for _ in range(2)]
    outs = [
        kvfold.generate(model, ids, cache=cache, do_sample=False, max_new_tokens=40, **how)
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    assert torch.equal(*outs)
    check_same(*caches)
    assert all(head[:9].tolist() == list(range(9)) for head in caches[1].positions(0)[0])


@pytest.mark.parametrize("spec", [RAGGED, *ENCODED, "d2o"])
def test_other_readers_of_a_context_see_it_as_it_was(model, spec):
    ids = prompts(ALONE)[0]
    cache = compressed(model, spec)
    kvfold.generate(model, ids, cache=cache, max_new_tokens=1)
    reader = fork(cache)
    before = [tensor.clone() for layer in reader.states for tensor in layer.stored().dense()]
    text = torch.cat([ids, continuation(1, 5)], 1)
    kvfold.generate(model, text, cache=cache, do_sample=False, max_new_tokens=60, **COMPILED)
    after = [tensor for layer in reader.states for tensor in layer.stored().dense()]
    assert all(map(torch.equal, before, after))
    again = fork(reader)
    outs = [
        kvfold.generate(model, text, cache=of_reader, do_sample=False, max_new_tokens=30, **how)
        for of_reader, how in ((reader, COMPILED), (again, {}))
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcaps_and_sinks_are_not_forgotten(name):
    torch._dynamo.reset()
    model = small(name, layer_types=["full_attention"] * 2)
    if name == "gpt_oss":
        model.set_experts_implementation("grouped_mm")
    for spec in ("snapkv:window=8", RAGGED, ENCODED[0], "h2o"):
        for lengths in (ALONE, PADDED):
            outs, caches = both(model, spec, lengths)
            assert torch.equal(*outs)
            check_same(*caches)


def test_questions_to_a_frozen_cache_are_answered_and_taken_back(model):
    """Padding between turns stands among the newest entries, where lengths differ too."""
    ids, mask = prompts((64, 53))
    question, padding = prompts((20, 12), seed=7)
    text, seen = torch.cat([ids, question], 1), torch.cat([mask, padding], 1)
    for spec in ("snapkv:window=8", RAGGED, *ENCODED, "h2o"):
        cache = compressed(model, spec)
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=1)
        before, outs = where(cache), []
        for how in ({}, COMPILED):
            with cache.frozen():
                options = {"cache": cache, "attention_mask": seen, **how, **GREEDY}
                outs.append(kvfold.generate(model, text, **options))
                cache.crop(64 - cache.get_seq_length())
            assert where(cache) == before
        assert torch.equal(*outs)


# --- everything that generate does -----------------------------------------------------------


@pytest.mark.parametrize("spec", ["snapkv:window=8", RAGGED])
def test_samples_are_the_same(model, spec):
    ids, mask = prompts(PADDED)
    outs = []
    for how in ({}, COMPILED):
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2, **how}
        cache = compressed(model, spec)
        options |= {"attention_mask": mask, "max_new_tokens": 12}
        outs.append(kvfold.generate(model, ids, cache=cache, **options))
    assert outs[0].shape == (6, 76) and torch.equal(*outs)


def test_the_end_token_ends_and_room_for_more_is_given_back(model):
    (free, _), _ = both(model, "snapkv:window=8", PADDED)
    end = free[0, 64 + 5].item()
    outs, caches = both(
        model, "snapkv:window=8", ALONE, eos_token_id=end, pad_token_id=0, max_new_tokens=900
    )
    assert torch.equal(*outs) and outs[0].shape[1] < 64 + 900
    check_same(*caches)
    assert caches[1].stats().slack_bytes < 2 * caches[0].stats().slack_bytes
    outs, caches = both(
        model, "snapkv:window=8", PADDED, eos_token_id=end, pad_token_id=0, max_new_tokens=12
    )
    assert torch.equal(*outs)
    check_same(*caches)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": None},
        {"max_length": 70, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=7)},
        {"prefill_chunk": 10},
        {"repetition_penalty": 1.3, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_options_of_generate_mean_the_same(model, options):
    outs, caches = both(model, "snapkv:window=8", **options)
    assert torch.equal(*outs)
    check_same(*caches)


def test_settings_of_the_model_count_where_the_call_has_none(model):
    model.generation_config.max_new_tokens = 30
    config = GenerationConfig(do_sample=False)
    outs, _ = both(model, "snapkv:window=8", generation_config=config)
    assert torch.equal(*outs) and outs[0].shape[1] == 64 + 30


class Streamer:
    """Keeps what it is told; fails when it was told `limit` tokens."""

    def __init__(self, limit: int = 99) -> None:
        self.told: list[int] = []
        self.limit = limit

    def put(self, tokens: torch.Tensor) -> None:
        self.told += tokens.flatten().tolist()
        if len(self.told) == 64 + self.limit:
            raise RuntimeError("the line is dead")

    def end(self) -> None:
        self.told.append(-1)


def test_tokens_are_streamed(model):
    streamer = Streamer()
    ids = prompts(ALONE)[0]
    cache = compressed(model, "snapkv:window=8")
    out = kvfold.generate(model, ids, cache=cache, streamer=streamer, **GREEDY, **COMPILED)
    assert streamer.told == [*out[0].tolist(), -1]


def test_after_an_error_the_cache_holds_what_was_read(model):
    outs, (expected, _) = both(model, "snapkv:window=8", max_new_tokens=5)
    cache = compressed(model, "snapkv:window=8")
    ids = prompts(ALONE)[0]
    with pytest.raises(RuntimeError, match="line is dead"):
        kvfold.generate(model, ids, cache=cache, streamer=Streamer(5), **GREEDY, **COMPILED)
    check_same(expected, cache)
    text = torch.cat([outs[0], continuation(1, 9)], 1)
    again = [kvfold.generate(model, text, cache=c, **GREEDY) for c in (expected, cache)]
    assert torch.equal(*again)


@pytest.mark.parametrize("spec", [RAGGED, ENCODED[0]])
def test_a_cache_whose_step_broke_off_is_refused(model, spec, monkeypatch):
    cache, ids = compressed(model, spec), prompts(ALONE)[0]
    whole, calls = CompressedLayer.finish, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2 + 4:  # in the last of two layers, two tokens after the prompt
            raise MemoryError("no room")
        whole(*args)

    monkeypatch.setattr(CompressedLayer, "finish", failing)
    with pytest.raises(MemoryError, match="no room"):
        kvfold.generate(model, ids, cache=cache, **GREEDY, **COMPILED)
    with pytest.raises(UnsupportedModel, match="make a new cache"):
        kvfold.generate(model, torch.cat([ids, continuation(1, 9)], 1), cache=cache, **GREEDY)


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", RAGGED])
def test_a_step_that_failed_when_its_token_was_stored_is_not_read_on(model, spec):
    calls: list[int] = []

    def failing(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            out = graph.forward(*args)
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no room")
            return out

        return run

    ids = prompts(ALONE)[0]
    cache, whole = compressed(model, spec), compressed(model, spec)
    text = kvfold.generate(model, ids, cache=whole, **(GREEDY | {"max_new_tokens": 3}))
    text = torch.cat([text, continuation(1, 9)], 1)
    name = f"failing_{id(calls)}"  # of a configuration only texts are taken
    torch._dynamo.register_backend(failing, name=name)
    once = {"compile_config": CompileConfig(fullgraph=True, backend=name, mode=None)}
    with pytest.raises(MemoryError, match="no room"):
        kvfold.generate(model, ids, cache=cache, compile=True, **once, **GREEDY)
    for options in (GREEDY, GREEDY | COMPILED):
        with pytest.raises(KvfoldError, match="stored its 1 tokens"):
            kvfold.generate(model, text, cache=cache, **options)
    if spec == "h2o":
        with pytest.raises(KvfoldError, match="evicted"):
            cache.crop(-1)
        return
    cache.crop(-1)
    check_same(whole, cache)
    again = [kvfold.generate(model, text, cache=c, **GREEDY) for c in (whole, cache)]
    assert torch.equal(*again)


def test_a_prompt_that_failed_when_it_was_stored_is_not_read_on(model):
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    cache, ids = compressed(model, "full"), prompts(ALONE)[0]
    handle = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        kvfold.generate(model, ids, cache=cache, **GREEDY, **COMPILED)
    handle.remove()
    with pytest.raises(KvfoldError, match="stored its 64 tokens"):
        kvfold.generate(model, torch.cat([ids, ids], 1), cache=cache, **GREEDY, **COMPILED)


# --- one graph -------------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize(
    "specs",
    [DENSE, [RAGGED, "adakv:window=4", ENCODED[1]], ["d2o"] * 2],
    ids=["dense", "segments", "d2o"],
)
def test_one_graph_serves_all_caches(model, specs, lengths):
    for length, spec in enumerate(specs * 2):
        longer = tuple(n + 7 * length for n in lengths)
        (eager, compiled), _ = both(model, spec, longer, max_new_tokens=5 + 9 * length)
        assert torch.equal(eager, compiled)
    assert graphs() == 1


def test_products_with_what_is_packed_are_compiled_once(model):
    for length in range(3):
        outs, _ = both(model, ENCODED[0], (64 + 9 * length,), max_new_tokens=5 + 9 * length)
        assert torch.equal(*outs)
    assert graphs() == 3  # one of them for all that is around


@pytest.mark.parametrize("spec", ["snapkv:window=8", ENCODED[0], "d2o"])
def test_the_default_compiler_gives_the_same_tokens(model, spec):
    ids = prompts(ALONE)[0]
    eager, compiled = (compressed(model, spec) for _ in range(2))
    expected = kvfold.generate(model, ids, cache=eager, **GREEDY)
    got = kvfold.generate(model, ids, cache=compiled, compile=True, **GREEDY)
    assert torch.equal(got, expected)
    # What the first step compiles while it runs, the second one compiles again.
    assert graphs() == (5 if spec == ENCODED[0] else 1)
    check_same(eager, compiled)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("cam", "shares out"),
        ("simlayerkv:when=first_decode", "may still compress"),
        ("h2o:decode=append", "adds up attention"),
        ("streaming_llm", "moves its sinks"),
    ],
)
def test_methods_that_do_more_at_a_step_are_refused(model, spec, reason):
    refused(model, spec, KvfoldError, reason)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma3", {"num_hidden_layers": 4}, "sliding window"),
        ("qwen3_5", {"num_hidden_layers": 4}, "recurrent state"),
        ("deepseek_v3", {}, "latents"),
        ("mixtral", {}, "experts one by one"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
            "rotary frequencies",
        ),
    ],
)
def test_models_that_one_graph_cannot_answer_for_are_refused(name, changes, reason):
    refused(build(name, **changes), "snapkv:window=8", UnsupportedModel, reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"num_beams": 2}, "beams"), ({"prompt_lookup_num_tokens": 3}, "assisted")],
)
def test_beams_and_assistants_are_refused(model, options, reason):
    refused(model, "snapkv:window=8", KvfoldError, reason, **options)


def refused(model: Any, spec: str, error: Any, reason: str, **options: Any) -> None:
    cache = compressed(model, spec, 40)
    with pytest.raises(error, match=reason):
        kvfold.generate(model, prompts(ALONE)[0], cache=cache, **COMPILED, **GREEDY, **options)
    assert cache.get_seq_length() == 0


# --- the kernel ------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, 8)])
def test_attention_to_buffers_is_the_reference_where_they_are_visible(softcap, sinks):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, 16, generator=generator)
        for heads, length in ((8, 1), (2, 30), (2, 30))
    )
    visible = torch.rand(2, 2, 30, generator=generator) < 0.5
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": sinks}
    mask = visible.repeat_interleave(4, 1)[:, :, None]
    expected, _ = attend_with_column_sums(query, keys, values, mask, **options)
    for poisoned in (keys, values):
        poisoned[~visible] = 1e4
    got = attend_to_buffers(query, keys, values, visible, **options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, 8)])
@pytest.mark.parametrize("bits", [(4, 4), (2, 8)])
def test_attention_to_what_is_packed_is_the_reference_on_what_it_stands_for(bits, softcap, sinks):
    """Of keys and of values there are differently many packed."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, 32, generator=generator)
        for heads, length in ((8, 1), (2, 100), (2, 100))
    )
    every = torch.arange(100).expand(2, 2, 100)
    encode = Packing(key_bits=bits[0], value_bits=bits[1], group=16, residual=48)
    store = RaggedStore(keys, values, None, every, encode)
    store.encode_due(decoding=False)
    stored = store.segments()
    assert reads_packed(stored)
    assert (stored.keys.alive[0], stored.values.alive[0]) == (4, 48)
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": sinks}
    expected, _ = attend_with_column_sums(query, *store.dense(), None, **options)
    got = attend_to_packed_segments(query, stored, backend="eager", **options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_packed_entries_of_half_precision_are_summed_up_in_full():
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(1, heads, length, 32, generator=generator).bfloat16()
        for heads, length in ((4, 1), (2, 100), (2, 100))
    )
    every = torch.arange(100).expand(1, 2, 100)
    store = RaggedStore(keys, values, None, every, Packing(group=16, residual=48))
    store.encode_due(decoding=False)
    decoded = [entries.float() for entries in store.dense()]
    expected, _ = attend_with_column_sums(query.float(), *decoded, None, scale=0.3)
    options: dict[str, Any] = {"scale": 0.3, "softcap": None, "sinks": None}
    got = attend_to_packed_segments(query, store.segments(), backend="eager", **options)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)


def test_what_is_packed_is_read_so(model, monkeypatch):
    def never(*args: object, **options: object) -> None:
        raise AssertionError("entries were unpacked")

    monkeypatch.setattr(segments, "attend_to_segments", never)
    outs, caches = both(model, ENCODED[0], max_new_tokens=30)
    assert torch.equal(*outs)
    check_same(*caches)


@pytest.mark.parametrize("room", [5, 500])
def test_room_holds_nothing_that_could_spoil_a_sum(room):
    grown = GrowingBuffer(torch.ones(1, 2, 30, 4))
    grown.reserve(0)[:, :, 30:] = torch.nan
    buffer = grown.reserve(room)
    assert buffer.shape[2] >= 30 + room and buffer.is_contiguous()
    assert buffer.sum() == 1 * 2 * 30 * 4 and torch.equal(grown.rows, buffer[:, :, :30])


def test_a_forward_that_torch_compiled_itself_gives_the_same():
    spec, model, ids = "h2o", build("llama", num_hidden_layers=1), prompts((40,))[0]
    options = {"max_new_tokens": 3, "do_sample": False}
    cache = CompressedCache(model, spec, 33)
    expected = kvfold.generate(model, ids, cache=cache, **options)
    torch._dynamo.reset()
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=counted)
    compiled = CompressedCache(model, spec, 33)
    assert torch.equal(kvfold.generate(model, ids, cache=compiled, **options), expected)
    assert compiled.stats() == cache.stats() and len(graphs) > 1


def test_what_is_noted_of_forwards_makes_no_graphs():
    """It changes with every token: traced, it would be compiled anew each time."""
    torch._dynamo.reset()
    counters.clear()
    model, pieces = build("llama", num_hidden_layers=1), continuation(1, 3).split(1, 1)
    eager, compiled = (CompressedCache(model, "full") for _ in range(2))
    forward = torch.compile(model, backend="eager")
    with torch.no_grad():
        for piece in pieces:
            expected = model(piece, past_key_values=eager).logits
            torch.testing.assert_close(forward(piece, past_key_values=compiled).logits, expected)
    assert torch.equal(compiled.history.whole(), torch.cat(pieces, 1).int())
    left_out = [reason for reason in counters["graph_break"] if "forward_returned" in reason]
    assert len(left_out) == 1
