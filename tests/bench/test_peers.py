# SPDX-License-Identifier: Apache-2.0
"""Peers in processes of their own: kvpress beside kvfold, and what goes wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench import counterparts, kvpress
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import AGAIN, FULL, FullParticipant, ParticipantLabel
from kvfold.bench.sdpa_variants import SdpaChoice
from kvfold.bench.session import BenchSession
from kvfold.errors import KvfoldError
from tests.helpers.benchmarks import cell_of

SNAPKV = ParticipantLabel("kvfold", "snapkv", "0.5")


@pytest.mark.whole
def test_the_peak_is_measured_in_a_process_of_its_own(subject: BenchModel) -> None:
    side = FullParticipant(subject, SdpaChoice())
    # 4 KiB of queries, keys and values a token are the least that a prompt of 4096 takes.
    assert (side.peak_alone(1, 4096, 1) or 0) > 2**20
    side.label = ParticipantLabel("kvfold", "nothing")
    with pytest.raises(KvfoldError, match=r"cannot measure the peak of nothing: .*unknown method"):
        side.peak_alone(1, 16, 1)


def test_counterparts_pass_on_parameters_and_what_is_evicted() -> None:
    def press(method: str, budget: str | None) -> Any:
        return counterparts.press(ParticipantLabel("kvpress", method, budget), 1000)

    votes = {"window_size": 16, "kernel_size": 5}
    assert press("snapkv:window=16,kernel=5", "0.25") == [
        "SnapKVPress", votes | {"compression_ratio": 0.75},
    ]  # fmt: skip
    assert press("adakv:window=16,kernel=5", "250") == [
        "AdaKVPress",
        {"press": ["SnapKVPress", votes | {"compression_ratio": 0.75}], "alpha_safeguard": 0.2},
    ]
    assert press("simlayerkv", None)[0] == "SimLayerKVPress"
    assert press("kvzip_plus", "0.25")[1]["kvzip_plus_normalization"] is True
    assert press("criticalkv:window=16,kernel=5,first=0.25", "0.25") == [
        "CriticalKVPress",
        {
            "press": ["SnapKVPress", votes | {"compression_ratio": 0.75}],
            "epsilon": 1e-4,
            "first_stage_ratio": 0.25,
        },
    ]
    assert press("compactor", "0.25")[1]["blending"] is None
    zap = {"model_type": "linear", "compression_ratio": 0.75}
    assert press("zap", "0.25") == ["KVzapPress", zap]
    for method in ("keydiff", "cur", "lagkv", "leverage", "non_causal", "expected_attention"):
        assert press(method, "0.25")[1]["compression_ratio"] == 0.75
    for method, budget in (
        (FULL, None),
        ("d2o", "0.2"),
        ("snapkv", "1MiB"),
        ("snapkv + kivi", "0.2"),
    ):
        assert press(method, budget) is None


def test_a_peer_takes_turns_from_its_own_process(
    stand_in: kvpress.KvpressPeer, subject: BenchModel
) -> None:
    cell = cell_of(subject)
    made = stand_in.makers([SNAPKV, ParticipantLabel("kvfold", "d2o", "0.5")])
    assert [str(label) for label in made] == ["kvpress full", "kvpress snapkv, 0.5"]
    run = BenchSession.of(subject, {"kvpress": stand_in.setup})
    (line,) = run.rounds(cell, made, dict.fromkeys(made, 1), lambda text: None)
    assert [r.side for r in line] == ["baseline", "baseline", "kvpress", "kvpress"]
    measured = line[3].measured
    assert (measured.prefill_seconds, measured.compression_seconds) == (1.5, 0.5)
    assert (measured.step_seconds, measured.cache_bytes) == ((0.25,) * 3, 1000)
    assert line[3].setup.versions == {"kvpress": "0"}
    # Its own full cache comes along where only a method of it is missing.
    (line,) = run.rounds(cell, made, {list(made)[1]: 1}, lambda text: None)
    assert [str(r.label) for r in line] == [
        FULL, AGAIN, "kvpress full", "kvpress snapkv, 0.5",
    ]  # fmt: skip


def test_a_peer_that_fails_says_why(stand_in: kvpress.KvpressPeer, subject: BenchModel) -> None:
    with pytest.raises(KvfoldError, match="kvpress failed: no dance"):
        stand_in.client.ask("dance")
    made = stand_in.makers([ParticipantLabel("kvfold", "knorm", "0.5")])
    side = list(made.values())[1]()
    with pytest.raises(KvfoldError, match="process ended: out of memory"):
        side.prefill(subject.tokens(1, 10), 1)


def test_a_peer_with_other_weights_is_refused(
    stand_in: kvpress.KvpressPeer, subject: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECK", "[1.0]")
    with pytest.raises(KvfoldError, match="other random weights"):
        kvpress.KvpressPeer(subject, Path(sys.executable))


def test_what_a_peer_cannot_hold_is_left_out(
    stand_in: kvpress.KvpressPeer, subject: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvpress, "free_memory", lambda: 2**30)
    short, long = cell_of(subject, length=1000), cell_of(subject, length=10**5)
    own, theirs = (
        ParticipantLabel("kvfold", "h2o", "0.2"),
        ParticipantLabel("kvpress", "h2o", "0.2"),
    )
    assert stand_in.left_out(theirs, short) is None
    assert "eager attention takes about" in str(stand_in.left_out(theirs, long))
    assert stand_in.left_out(own, long) is None
    rows_at_once = long.model_copy(update={"batch": 2})
    assert "one row" in str(
        stand_in.left_out(ParticipantLabel("kvpress", "kvzip", "0.2"), rows_at_once)
    )


def test_a_python_without_kvpress_is_refused(subject: BenchModel) -> None:
    # It needs an older transformers than the one beside kvfold, so it cannot be here.
    with pytest.raises(KvfoldError, match=r"cannot import kvpress .* pip install"):
        kvpress.KvpressPeer(subject, Path(sys.executable))
