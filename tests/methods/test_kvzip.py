# SPDX-License-Identifier: Apache-2.0
"""AdaKV, KVzip, SimLayerKV, DBudgetKV and RoCo as methods: options, and what a cache keeps."""

import re

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError, parse
from kvfold.hf.chat_template import Frame, token_ids
from kvfold.methods.base import Across, Measured
from kvfold.methods.kvzip import INSTRUCTION, PREVIOUS, REPEAT, REPEAT_FROM
from tests.helpers.models import build, prompts
from tests.helpers.observations import observe
from tests.helpers.truth import Reader

LENGTHS = (64, 53, 24)


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def kept(model, spec, budget=None):
    """Entries after a padded prefill: `[L][B][H]`."""
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, spec, budget)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return torch.tensor(cache.stats().kept), cache


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adakv:floor=1.5", "0 to 1"),
        ("adakv:floor=nan", "0 to 1"),
        ("adakv:kernel=2", "odd and positive"),
        ("kvzip:chunk=0", "at least 1 token"),
        ("kvzip:strict=true,level=head", "choose level=pair"),
        ("simlayerkv:window=0", "1 or more"),
        ("simlayerkv:n_last=0", "1 or more"),
        ("simlayerkv:sinks=-1", "0 or more"),
        ("simlayerkv:strategy=random,when=first_decode", "choose when=last_query"),
        ("simlayerkv_qwen:strategy=pyramid", "keep_last_layer=false"),
        ("dbudgetkv:threshold=-0.1", "0 or more"),
        ("dbudgetkv:threshold=nan", "0 or more"),
        ("dbudgetkv:rows=0", "rows 1 or more"),
        ("dbudgetkv:sinks=-1", "sinks is 0 or more"),
        ("roco:protect_recent=-1", "0 or more"),
        ("roco:protect_std_ratio=1.1", "0 to 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec)


def test_presets_hold_the_published_values():
    thresholds = {
        name: parse(f"simlayerkv_{name}").threshold
        for name in ("llama2", "llama3", "mistral", "qwen")
    }
    assert thresholds == {"llama2": 0.65, "llama3": 0.9, "mistral": 0.8, "qwen": 0.85}
    assert parse("simlayerkv_qwen").keep_last_layer and not parse("simlayerkv").keep_last_layer
    assert parse("dbudgetkv_literal").include_sinks and not parse("dbudgetkv").include_sinks
    assert parse("dbudgetkv").keep_layers == (0, 1)


# --- AdaKV -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["adakv:window=8", "adakv:window=8,normalize=true"])
def test_adakv_spends_exactly_a_layer_s_budget(model, spec):
    counts, cache = kept(model, spec, 20)
    assert counts.sum(-1).eq(40).all()
    assert counts.min() >= 8 + int(12 * 0.2)
    assert counts.unique().numel() > 4
    newest = set(range(56, 64))
    assert all(newest <= set(head.tolist()) for head in cache.positions(1)[0])


def test_adakv_with_a_floor_of_one_is_snapkv(model):
    ours, theirs = (
        kept(model, spec, 20)[1] for spec in ("adakv:window=8,floor=1", "snapkv:window=8")
    )
    for layer in range(4):
        for row in range(3):
            for a, b in zip(ours.positions(layer)[row], theirs.positions(layer)[row], strict=True):
                assert a.tolist() == b.tolist()


def test_adakv_options_reach_the_allocation(model):
    specs = ["", ",floor=0.9", ",rule=blend", ",normalize=true"]
    counts = [kept(model, f"adakv:window=8{more}", 20)[0].flatten().tolist() for more in specs]
    assert len(set(map(tuple, counts))) == len(specs)


def test_adakv_shares_another_method_s_budgets_among_heads(model):
    pyramid = kept(model, "pyramidkv:window=8", 20)[0]
    shared = kept(model, "pyramidkv:window=8 + adakv", 20)[0]
    assert torch.equal(shared.sum(-1), pyramid.sum(-1))
    assert not torch.equal(shared, pyramid)


# --- what spends something else than its budget ------------------------------------------------


@pytest.mark.parametrize("part", [0.05, 0.3])
def test_d2o_as_released_says_what_it_spends_beside_its_budget(model, part):
    ids = prompts((128,))[0]
    cache = CompressedCache(model, "d2o_official:sinks=0", part)
    Reader(model, cache)(ids)
    stats = cache.stats()
    assert [layer[0][0] for layer in stats.kept[:2]] == [128, 128] == stats.kept[3][0]
    assert stats.kept[2][0][0] <= 128 * part * 1.7
    assert f"{stats.mean_kept:.1f} entries" in str(stats) and "0, 1, -1 stay whole" in str(stats)
    assert "stay whole" not in str(CompressedCache(model, "d2o_official", part).stats())


@pytest.mark.parametrize(
    ("spec", "budget", "why"),
    [
        ("pyramidkv_official:window=8", 20, "rounds its step down"),
        ("adakv:window=8,rule=blend", 20, "rounded by itself"),
        ("d2o:allocation=exponential", 20, "do not add up"),
        ("pyramidkv_official:window=8 + adakv:rule=blend", 20, "step down.*; .*by itself"),
    ],
)
def test_methods_that_do_not_spend_their_budget_say_why(model, spec, budget, why):
    cache = CompressedCache(model, spec, budget)
    Reader(model, cache)(prompts((64,))[0])
    assert re.search(why, str(cache.stats()))


# --- KVzip -------------------------------------------------------------------------------------


def test_kvzip_asks_as_the_released_code_does():
    how = parse("kvzip:chunk=100").stages().needs.reconstruction
    assert (how.chunk, how.first, how.later, how.previous) == (100, REPEAT, REPEAT_FROM, PREVIOUS)
    assert REPEAT == "\n\nRepeat the previous context exactly."
    assert REPEAT_FROM.endswith("starting with ") and PREVIOUS == 8
    assert parse("kvzip").stages().needs.reconstruction.chunk == 2000


@pytest.mark.parametrize(
    ("options", "missing"), [("", 0), ("strict=true", 1), ("level=uniform", 0), ("level=head", 0)]
)
def test_kvzip_spends_its_budget_over_all_layers_and_heads(options, missing):
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    context = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 20)
    # What opens the chat is kept beside the budget.
    opening = len(token_ids(tokenizer, Frame.of(tokenizer).before)[0])
    counts = torch.tensor(context.stats().kept)[:, 0] - opening
    heads, whole = counts.numel(), context.stats().seen - opening
    if options == "level=uniform":
        assert counts.eq(20).all()
    elif options == "level=head":
        assert set(counts.flatten().tolist()) == {0, whole}
        assert (counts == whole).sum() == heads * 20 // whole
    else:
        assert counts.sum() == heads * 20 - missing
        assert counts.unique().numel() > 4


def test_kvzip_strict_spends_what_the_released_threshold_leaves():
    """Which is int(r·N) − 1 of all N pairs, and not r of each head's, rounded down."""
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = len(token_ids(tokenizer, Frame.of(tokenizer).before)[0])
    kept = {}
    for options in ("strict=true", "strict=false"):
        stats = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 0.29).stats()
        counts = torch.tensor(stats.kept)[:, 0] - opening
        kept[options], tokens = int(counts.sum()), stats.seen - opening
    heads = counts.numel()
    assert int(0.29 * tokens) * heads < int(0.29 * tokens * heads) - 1
    assert kept["strict=true"] == int(0.29 * tokens * heads) - 1
    assert kept["strict=false"] == int(0.29 * tokens) * heads


def test_kvzip_may_put_the_released_instruction_before_the_document():
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = Frame.of(tokenizer).before
    with_it = kvfold.compress(small, tokenizer, text, "kvzip:instruction=true", 20)
    expected = token_ids(tokenizer, opening + INSTRUCTION)
    assert torch.equal(with_it.ids[:, : expected.shape[1]].cpu(), expected)
    assert with_it.stats().protected == [expected.shape[1]]
    without = kvfold.compress(small, tokenizer, text, "kvzip", 20)
    assert without.stats().protected == [len(token_ids(tokenizer, opening)[0])]
    assert INSTRUCTION.startswith("Given the context, answer to the following question")
    cache = CompressedCache(small, "kvzip:instruction=true", 20, tokenizer=tokenizer)
    with pytest.raises(KvfoldError, match=r"does not begin with.*use kvfold\.compress"):
        kvfold.generate(small, token_ids(tokenizer, opening, text), cache=cache, max_new_tokens=1)


def test_kvzip_head_scores_that_do_not_fit_are_refused(tmp_path):
    small, tokenizer = kvfold.bundled_model()

    def compress(file):
        spec = f"kvzip:level=head,head_scores={file}"
        return kvfold.compress(small, tokenizer, "the old house was quiet", spec, 0.5)

    config = small.config
    shape = config.num_hidden_layers, config.num_key_value_heads
    for name, held in (
        ("other.pt", torch.rand(shape[0] + 1, shape[1])),
        ("nan.pt", torch.full(shape, torch.nan)),
        ("list.pt", [1, 2]),
    ):
        torch.save(held, tmp_path / name)
    (tmp_path / "text.pt").write_text("no tensor")
    (tmp_path / "text.safetensors").write_text("no tensor")
    with pytest.raises(KvfoldError, match=rf"scores {shape[0] + 1} layers.*model has {shape[0]}"):
        compress(tmp_path / "other.pt")
    for name in ("nan.pt", "list.pt", "text.pt", "text.safetensors", "absent.pt"):
        with pytest.raises(KvfoldError, match=rf"cannot read .*{name} as scores of heads"):
            compress(tmp_path / name)
    with pytest.raises(KvfoldError, match="choose level=head"):
        parse("kvzip:head_scores=a.pt")


def test_a_context_made_with_head_scores_is_loaded_without_their_file(tmp_path):
    small, tokenizer = kvfold.bundled_model()
    scores = tmp_path / "heads.pt"
    torch.save(torch.rand(small.config.num_hidden_layers, small.config.num_key_value_heads), scores)
    spec = f"kvzip:level=head,head_scores={scores}"
    text = "the garden of the old house was quiet and nobody came " * 3
    context = kvfold.compress(small, tokenizer, text, spec, 0.5)
    context.save(tmp_path / "house.kvfold")
    scores.unlink()
    again = kvfold.load(tmp_path / "house.kvfold", small, tokenizer)
    assert again.stats().kept == context.stats().kept
    assert again.stats().method == spec


# --- SimLayerKV --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("threshold=-1", [12, 12, 12]),
        ("threshold=1", [64, 53, 24]),
        ("threshold=-1,sinks=8,window=16", [24, 24, 24]),
    ],
)
@pytest.mark.parametrize("when", ["last_query", "prefill", "first_decode"])
def test_simlayerkv_trims_all_layers_or_none_at_the_ends(model, options, expected, when):
    defaults = "" if "window" in options else ",window=8"
    spec = f"simlayerkv:{options}{defaults},when={when}"
    counts, cache = kept(model, spec)
    if when == "first_decode":
        assert counts[..., 0].tolist() == [[64, 53, 24]] * 4
        mask = torch.cat([prompts(LENGTHS)[1], torch.ones(3, 1, dtype=torch.long)], 1)
        with torch.no_grad():
            model(torch.full((3, 1), 5), attention_mask=mask, past_key_values=cache)
        counts = torch.tensor(cache.stats().kept)
        expected = [n + 1 if "threshold=1" in options else n for n in expected]
    assert counts.tolist() == [[[n] * 2 for n in expected]] * 4
    if options == "threshold=-1" and when == "last_query":
        places = [0, 1, 2, 3, *range(56, 64)]
        assert cache.positions(0)[0][0].tolist() == places


def test_simlayerkv_may_keep_the_last_layer(model):
    counts, _ = kept(model, "simlayerkv:window=8,threshold=-1,keep_last_layer=true")
    assert counts[:, 0, 0].tolist() == [12, 12, 12, 64]


def test_simlayerkv_asks_the_queries_it_names():
    for when, window in (("last_query", 1), ("first_decode", 1), ("prefill", 5)):
        stages = parse(f"simlayerkv:when={when},n_last=5").stages()
        assert stages.needs.window == window
        assert stages.decode == ("once" if when == "first_decode" else "append")
    seen = observe([40], layer=1)
    sizes = set()
    for when in ("last_query", "prefill,n_last=5", "prefill,n_last=5,recent=30"):
        threshold = _threshold_between(seen, when)
        sizes.add(round(threshold, 3))
    assert len(sizes) == 3


def _threshold_between(seen, when):
    """The attention mass that the method sees, by bisection over its threshold."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        stages = parse(f"simlayerkv:window=8,sinks=2,threshold={middle},when={when}").stages()
        assert isinstance(stages.allocate, Measured)
        low, high = (middle, high) if int(stages.allocate.size(seen)) == 10 else (low, middle)
    return low


@pytest.mark.parametrize("strategy", ["random", "random_bottom", "random_top", "pyramid"])
def test_simlayerkv_strategies_keep_as_much_as_it_does(strategy):
    # With other numbers of heads, so that what is drawn differs.
    layers = [observe([40, 31], heads=1 + layer, layers=6, seed=3) for layer in range(6)]
    spec = "simlayerkv:window=8,sinks=2,threshold=0.3"
    lazy = parse(spec).stages().allocate
    compared = parse(f"{spec},strategy={strategy}").stages().allocate
    assert isinstance(lazy, Measured) and isinstance(compared, Across)
    alone = torch.stack([lazy.size(seen) for seen in layers])
    nobody = torch.zeros(2, dtype=torch.long)
    shared = torch.stack(
        compared.share([compared.statistic(seen) for seen in layers], nobody, nobody)
    )
    trimmed = (alone == 10).sum(0)
    assert 0 < trimmed.max() < 6
    if strategy in ("random", "pyramid"):
        assert torch.equal(shared.sum(0), alone.sum(0))
    else:
        assert (shared == 10).sum(0).tolist() == trimmed.clamp(max=3).tolist()
        other = shared[3:] if strategy == "random_bottom" else shared[:3]
        assert other.tolist() == [[40, 31]] * 3


# --- DBudgetKV ---------------------------------------------------------------------------------


def test_dbudgetkv_keeps_sinks_and_a_tail_of_each_row(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2")
    assert counts[:2].tolist() == [[[64] * 2, [53] * 2, [24] * 2]] * 2
    assert counts[2:].unique().numel() > 2 and (counts[2:] < counts[:1]).any()
    for row, length in enumerate(LENGTHS):
        for layer in (2, 3):
            count = int(counts[layer, row, 0])
            places = cache.positions(layer)[row][0] - (64 - length)
            assert places.tolist() == [0, 1, 2, 3, *range(length - count + 4, length)]


def test_dbudgetkv_by_attention_keeps_the_last_and_the_best(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2,ranking=attention,keep_layers=1")
    assert counts[1].tolist() == [[64] * 2, [53] * 2, [24] * 2]
    first, second = cache.positions(2)[0]
    assert len(first) == len(second) and first.tolist() != second.tolist()
    assert set(range(56, 64)) <= set(first.tolist())


def test_dbudgetkv_options_reach_the_cut(model):
    specs = ["", ",sinks=2", ",rows=3", ",include_sinks=true", ",threshold=0.3", ",keep_layers=2"]
    counts = [kept(model, f"dbudgetkv:threshold=0.2{more}")[0] for more in specs]
    assert len({tuple(c.flatten().tolist()) for c in counts}) == len(specs)
    for rows, ranking, window in ((1, "position", 1), (3, "position", 3), (3, "attention", 8)):
        needs = parse(f"dbudgetkv:rows={rows},ranking={ranking}").stages().needs
        assert needs.window == window


# --- RoCo --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "grown"), [("hold", 0), ("append", 5)])
def test_roco_holds_its_budget_or_lets_tokens_come_on_top(model, decode, grown):
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, f"roco:decode={decode}", 20)
    kvfold.generate(
        model,
        input_ids=ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=6,
        do_sample=False,
    )
    assert torch.tensor(cache.stats().kept).eq(20 + grown).all()


def test_roco_never_evicts_its_last_tokens(model):
    for spec, protected in (("roco", 10), ("roco:protect_recent=30,protect_std_ratio=0.8", 30)):
        cache = kept(model, spec, 40)[1]
        for head in cache.positions(2)[0]:
            assert set(range(64 - protected, 64)) <= set(head.tolist())
    specs = [f"roco:protect_recent=0,protect_std_ratio={ratio}" for ratio in (0, 0.9)]
    sets = {str([h.tolist() for h in kept(model, spec, 40)[1].positions(2)[0]]) for spec in specs}
    assert len(sets) == 2
