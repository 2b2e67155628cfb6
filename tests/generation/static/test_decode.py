# SPDX-License-Identifier: Apache-2.0
"""compile=True changes how long a token takes, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import kvfold
from kvfold import CompressedCache, KvfoldError, parse
from kvfold.cache.fork import fork
from kvfold.generation.static.layer_graphs import decoder_layers
from kvfold.methods.stages.when import Hold
from tests.helpers.budgets import NAMED, compressed
from tests.helpers.compiled import (
    ALONE,
    COMPILED,
    DENSE,
    ENCODED,
    GREEDY,
    HOLDING,
    LOGITS,
    PADDED,
    both,
    check_same,
    graphs,
    small,
    where,
)
from tests.helpers.models import build, continuation, prompts

# Each graph takes seconds to compile.
pytestmark = pytest.mark.slow
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
RAGGED = "adakv:window=8"


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def family(request):
    torch._dynamo.reset()  # at most eight graphs at a time
    return small(request.param)


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    return small("llama")


@pytest.mark.cases(1)
@BATCHES
@pytest.mark.parametrize("spec", [*DENSE, RAGGED, *ENCODED, *HOLDING])
def test_tokens_logits_and_cache_are_those_of_eager_decoding(family, spec, lengths):
    outs, caches = both(family, spec, lengths, **LOGITS)
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6)
    assert outs[1].past_key_values is caches[1]
    check_same(*caches)


@pytest.mark.cases(1)
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


@pytest.mark.whole
@pytest.mark.parametrize(
    ("spec", "budget", "protect"),
    [
        ("streaming_llm_original", 4, []),  # keeps its first tokens only
        ("d2o", 4, []),
        ("h2o", 1, []),
        ("d2o", 0.9, [(64, 90)]),  # forced entries outgrow the budget
        ("tova", 0.05, [(66, 70)]),
    ],
)
def test_small_sizes_go_on_as_after_eager_decoding(model, spec, budget, protect):
    ids, outs = prompts(ALONE)[0], []
    caches = [CompressedCache(model, spec, budget, protect=protect) for _ in range(2)]
    for cache, how in zip(caches, ({}, COMPILED), strict=True):
        text = kvfold.generate(model, ids, cache=cache, **how, **GREEDY)
        text = torch.cat([text, continuation(1, 9, 0)], 1)
        outs.append(kvfold.generate(model, text, cache=cache, **LOGITS, **GREEDY))
    for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6)
    assert where(caches[0]) == where(caches[1])


@pytest.mark.whole
def test_every_method_decodes_the_same_or_is_refused():
    torch._dynamo.reset()
    counters.clear()
    refusing, evicting, hooked = [], set(), 0
    for spec in (spec for spec in NAMED if not spec.startswith("kvzip")):  # needs a tokenizer
        model = small("llama")
        try:
            outs, caches = both(model, spec)
        except KvfoldError:
            in_rounds = bool(parse(spec).stages().rounds)
            refusing.append("rounds" if in_rounds else spec.split(":")[0].split("_")[0])
            continue
        assert torch.equal(*outs)
        check_same(*caches)
        stages = caches[0].method.stages()
        if isinstance(stages.when, Hold):
            evicting.add(repr((stages.score, stages.merge and stages.merge.one)))
        hooked += decoder_layers(model) is None
    # Beside those that evict: one for rectangles, one for segments, and one of a whole model.
    assert graphs() == 2 + len(evicting) + hooked
    assert hooked == 1  # PyramidInfer's own forwards ask for hidden states
    assert set(refusing) == {"cam", "streaming", "rounds", "sirllm"}


@pytest.mark.whole
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(2)
@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", RAGGED, ENCODED[0], "h2o"])
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_softcaps_and_sinks_are_not_forgotten(name, spec, lengths):
    torch._dynamo.reset()
    model = small(name, layer_types=["full_attention"] * 2)
    if name == "gpt_oss":
        model.set_experts_implementation("grouped_mm")
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


@pytest.mark.cases(2)
@BATCHES
@pytest.mark.parametrize(
    "specs",
    [DENSE, [RAGGED, "adakv:window=4", ENCODED[2]], ["d2o"] * 2],
    ids=["dense", "segments", "d2o"],
)
def test_one_graph_serves_all_caches(model, specs, lengths):
    for length, spec in enumerate(specs * 2):
        longer = tuple(n + 7 * length for n in lengths)
        (eager, compiled), _ = both(model, spec, longer, max_new_tokens=5 + 9 * length)
        assert torch.equal(eager, compiled)
    assert graphs() == 1


@pytest.mark.whole
def test_looking_up_positions_makes_no_graph():
    torch._dynamo.reset()
    counters.clear()
    outs, _ = both(build("gpt2"), "snapkv:window=8", (60,), max_new_tokens=6)
    assert torch.equal(*outs)
    assert graphs() == 1


def test_what_is_packed_needs_no_graph_of_its_own(model):
    for length in range(3):
        outs, _ = both(model, ENCODED[0], (64 + 9 * length,), max_new_tokens=5 + 9 * length)
        assert torch.equal(*outs)
    assert graphs() == 1


@pytest.mark.whole
@pytest.mark.parametrize("spec", ["snapkv:window=8", ENCODED[0], "d2o"])
def test_the_default_compiler_gives_the_same_tokens(model, spec):
    ids = prompts(ALONE)[0]
    eager, compiled = (compressed(model, spec) for _ in range(2))
    expected = kvfold.generate(model, ids, cache=eager, **GREEDY)
    got = kvfold.generate(model, ids, cache=compiled, compile=True, **GREEDY)
    assert torch.equal(got, expected)
    assert graphs() == 1
    check_same(eager, compiled)


@pytest.mark.whole
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


@pytest.mark.whole
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
    assert torch.equal(compiled.phase.history.whole(), torch.cat(pieces, 1).int())
    left_out = [reason for reason in counters["graph_break"] if "forward_returned" in reason]
    assert len(left_out) == 1
