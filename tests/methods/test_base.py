# SPDX-License-Identifier: Apache-2.0
"""Methods as texts: presets, options, compositions, and texts that cannot be read."""

import pytest

import kvfold
from kvfold import H2O, TOVA, IllegalComposition, KNorm, KvfoldError, PyramidKV, SnapKV, parse
from kvfold.methods.base import Composition, preset
from kvfold.methods.registry import listed


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("snapkv", SnapKV()),
        ("snapkv", SnapKV(window=32, kernel=7, pooling="max", pool_first=False)),
        ("snapkv_official", SnapKV(window=64, kernel=5, pooling="avg")),
        ("snapkv_kvpress", SnapKV(window=64, kernel=5, pooling="avg", pool_first=True)),
        ("pyramidkv", PyramidKV(window=8, kernel=7, pooling="max", beta=20, rounding="exact")),
        ("pyramidkv_official", PyramidKV(rounding="official")),
        ("snapkv_official:window=16", SnapKV(window=16, kernel=5, pooling="avg")),
        ("snapkv:window=16", SnapKV(window=16)),
        ("snapkv:window=16,kernel=5", SnapKV(window=16, kernel=5)),
        ("  snapkv : window = 16 , kernel=5, ", SnapKV(window=16, kernel=5)),
        ("snapkv:pooling=avg", SnapKV(pooling="avg")),
        ("h2o:recent=0.25", H2O(recent=0.25)),
        ("h2o:recent=1", H2O(recent=1.0)),
        ("h2o:decode=append,normalize=visible_queries", H2O(0.5, "append", "visible_queries")),
        ("tova:per_head=true", TOVA(per_head=True)),
        ("tova:per_head=1,keep_last=Yes", TOVA(per_head=True, keep_last=True)),
        ("tova:per_head=false", TOVA()),
        ("snapkv_kvpress:pool_first=no", SnapKV(window=64, kernel=5, pooling="avg")),
        ("snapkv_kvpress:pool_first=0", SnapKV(window=64, kernel=5, pooling="avg")),
        ("knorm:skip_layers=0/1", KNorm(skip_layers=(0, 1))),
        ("knorm:skip_layers=12", KNorm(skip_layers=(12,))),
        ("knorm:protect_recent=3,skip_layers=5/0", KNorm(3, (5, 0))),
        ("knorm:skip_layers=0,1", KNorm(skip_layers=(0, 1))),
        ("knorm:skip_layers=0,1,protect_recent=3", KNorm(3, (0, 1))),
        ("knorm:skip_layers=0, -1", KNorm(skip_layers=(0, -1))),
    ],
)
def test_a_text_names_a_method(spec, method):
    assert parse(spec) == method
    # 1 == 1.0 == True: the kinds must be right as well.
    assert repr(parse(spec)) == repr(method)


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:window=0",
        "snapkv:window=-1",
        "snapkv:kernel=4",
        "pyramidkv:beta=0",
        "h2o:recent=2",
        "streaming_llm:sinks=-1",
        "knorm:protect_recent=-1",
        "pyramidinfer:sinks=-1",
        "pyramidinfer:newest_weight=-1",
    ],
)
def test_a_value_that_cannot_work_is_refused_at_once(spec):
    with pytest.raises(KvfoldError):
        parse(spec)


def test_a_method_is_its_own_text():
    method = SnapKV(window=3)
    assert parse(method) is method


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("snapkv", "snapkv"),
        ("snapkv:window=32", "snapkv"),
        ("snapkv:kernel=5,window=16", "snapkv:window=16,kernel=5"),
        ("snapkv_official", "snapkv:window=64,kernel=5,pooling=avg"),
        ("h2o:recent=0.25,decode=append", "h2o:recent=0.25,decode=append"),
        ("tova:keep_last=yes", "tova:keep_last=True"),
        ("knorm:skip_layers=0,1", "knorm:skip_layers=0/1"),
        ("full + tova:per_head=1", "full + tova:per_head=True"),
    ],
)
def test_a_text_says_what_differs_from_the_defaults(spec, text):
    assert str(parse(spec)) == text
    assert parse(text) == parse(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkb", "unknown method 'snapkb': did you mean 'snapkv'"),
        ("piramidkv:window=3", "did you mean 'pyramidkv'"),
        ("zzz", "unknown method 'zzz': `kvfold methods` lists them, and --import MODULE"),
        ("", "an empty method name"),
        ("   ", "an empty method name"),
        (":window=3", "an empty method name"),
        ("snapkv +", "an empty method name"),
        ("+", "an empty method name"),
        ("snapkv:windw=3", "snapkv has no option 'windw'; it has window, kernel"),
        ("full:window=3", "full has no option 'window'; it has none"),
        ("snapkv:=3", "no option ''"),
        ("snapkv:name=x", "no option 'name'"),
        ("snapkv:window", "cannot read 'window'.*option=value"),
        ("snapkv:window=", "cannot read 'window='.*option=value"),
        ("snapkv:window=8,kernel", "cannot read 'kernel'.*option=value"),
        ("snapkv:window=many", "snapkv:window takes a whole number, not 'many'"),
        ("snapkv:window=8.5", "snapkv:window takes a whole number, not '8.5'"),
        ("h2o:recent=half", "h2o:recent takes a number, not 'half'"),
        ("snapkv:pooling=median", "snapkv:pooling takes max or avg, not 'median'"),
        ("tova:per_head=maybe", "tova:per_head takes true or false, not 'maybe'"),
        ("knorm:skip_layers=a/b", "knorm:skip_layers takes .*, not 'a/b'"),
        ("snapkv:window=99999999999999999999", "snapkv:window is a number from .*, not 1e.20"),
        ("h2o + minicache:t=nan", "nan"),
        (
            "pyramidinfer:newest_weight=1e308",
            "pyramidinfer:newest_weight is a number .*, not 1e.308",
        ),
        ("knorm:skip_layers=1/99999999999", "knorm:skip_layers is a number from .*, not 1e.11"),
        (type(preset("snapkv"))(window=2**31), "snapkv:window is a number from"),
    ],
)
def test_what_cannot_be_read_is_refused(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("SnapKV", "snapkv"),
        ("SnapKVPress", "snapkv"),
        ("snap-kv", "snapkv"),
        ("snap_kv_official", "snapkv_official"),
        ("StreamingLLMPress", "streaming_llm"),
        ("PyramidKV:window=16", "pyramidkv:window=16"),
        ("SNAPKV:window=16 + Every:interval=32", "snapkv:window=16 + every:interval=32"),
        ("KIVI+SnapKV", "kivi + snapkv"),
    ],
)
def test_case_hyphens_and_press_make_no_difference(spelled, name):
    assert parse(spelled) == parse(name)
    assert str(parse(spelled)) == str(parse(name))


def test_at_most_three_near_names_are_told():
    with pytest.raises(KvfoldError) as refusal:
        parse("SnapKVVPress")
    told = str(refusal.value)
    assert 1 <= told.count(" or ") <= 2
    assert "`kvfold methods`" in told and "--import MODULE" in told and len(told) < 300


class SnapKVPress:
    """Stands for another library's object."""


def test_another_library_s_object_is_refused_by_the_name_of_ours():
    with pytest.raises(KvfoldError, match=r"write 'snapkv'$"):
        parse(SnapKVPress())  # type: ignore[arg-type]
    with pytest.raises(KvfoldError, match=r'a method is a text.*write for example "snapkv:window'):
        parse(0.5)  # type: ignore[arg-type]


def test_a_preset_takes_names_only():
    assert preset("snapkv_official").window == 64
    with pytest.raises(KvfoldError, match="unknown method"):
        preset("snapkv:window=3")


def test_a_composition_brings_all_stages_of_its_parts():
    composed = parse("full + snapkv:window=16")
    assert isinstance(composed, Composition)
    assert composed.parts == (kvfold.Full(), SnapKV(window=16))
    stages, alone = composed.stages(), SnapKV(window=16).stages()
    assert stages.needs == alone.needs and stages.forced == alone.forced
    assert stages.score.keywords == alone.score.keywords
    assert stages.allocate is alone.allocate
    assert parse(str(composed)) == composed


@pytest.mark.parametrize(
    ("spec", "stage"),
    [
        ("knorm + random", "score"),
        ("snapkv + knorm", "score"),
        ("snapkv + snapkv", "score"),
        ("snapkv + pyramidkv:window=4", "score"),
        ("full + h2o + tova", "score"),
    ],
)
def test_two_methods_cannot_bring_the_same_stage(spec, stage):
    with pytest.raises(IllegalComposition, match=f"both bring the {stage} stage") as caught:
        parse(spec)
    for part in spec.split(" + ")[-2:]:
        assert part in str(caught.value)


def test_a_composition_made_by_hand_is_checked_too():
    with pytest.raises(IllegalComposition):
        Composition((KNorm(), TOVA())).stages()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "snapkv:window=16,kernel=5, knorm:skip_layers=0,1,kivi:bits=4 + h2o,d2o_official",
            [
                "snapkv:window=16,kernel=5",
                "knorm:skip_layers=0,1",
                "kivi:bits=4 + h2o",
                "d2o_official",
            ],
        ),
        (
            "snapkv,pyramidkv:window=8,beta=20,h2o + merge:rule=d2o",
            ["snapkv", "pyramidkv:window=8,beta=20", "h2o + merge:rule=d2o"],
        ),
        (" a , b:c=1 , d=2,e", ["a", "b:c=1, d=2", "e"]),
        ("knorm:skip_layers=0/1,h2o", ["knorm:skip_layers=0/1", "h2o"]),
        ("", []),
        (" , ", []),
    ],
)
def test_commas_part_methods_and_their_options(text, expected):
    assert listed(text) == expected
