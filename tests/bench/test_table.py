# SPDX-License-Identifier: Apache-2.0
"""Tables, pictures and summaries of a benchmark."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from kvfold.bench import session
from kvfold.bench.lineup import makers
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import AGAIN, FULL, ParticipantLabel
from kvfold.bench.picture import figure
from kvfold.bench.summary import rows
from kvfold.bench.table import tables
from kvfold.evidence.estimates import Quartiles
from kvfold.terminal import console
from tests.helpers.benchmarks import bench, cell_of, record

NOISE = ParticipantLabel("baseline", AGAIN)
SNAPKV = ParticipantLabel("kvfold", "snapkv", "0.5")


def test_ratios_come_from_the_same_round_only(subject: BenchModel) -> None:
    cell = cell_of(subject)
    full = ParticipantLabel("baseline", FULL)
    lines = [
        record(full, cell=cell, first=2.0, steps=(1.0, 4.0, 2.0), peak=50, subject=subject),
        record(SNAPKV, cell=cell, first=1.0, steps=(0.5, 1.0, 2.0), nbytes=25, peak=40,
               subject=subject),
        record(full, cell=cell, index=1, first=10.0, steps=(9.0,), subject=subject),
        # Nobody else in this round, another session, another cell: no ratio.
        record(SNAPKV, cell=cell, index=2, first=77.0, subject=subject),
        record(SNAPKV, cell=cell, name="b", first=88.0, subject=subject),
        record(SNAPKV, cell=cell.model_copy(update={"length": 9}), index=1, subject=subject),
    ]  # fmt: skip
    own, other = (row for row in rows(lines) if row.label == SNAPKV)
    assert own.rounds == 3
    assert own.first_token == Quartiles(0.5, 0.5, 0.5)
    # The median of 0.5, 0.25 and 1, step by step.
    assert own.per_token == Quartiles(0.5, 0.5, 0.5)
    assert own.nbytes == Quartiles(0.25, 0.25, 0.25)
    assert own.peak == Quartiles(0.8, 0.8, 0.8)
    assert other.first_token is None and other.per_token is None


def test_the_spread_is_of_rounds(subject: BenchModel) -> None:
    cell = cell_of(subject)
    lines = [
        record(label, cell=cell, index=i, first=first, subject=subject)
        for i, own in enumerate((1.0, 2.0, 3.0, 4.0, 5.0))
        for label, first in ((ParticipantLabel("baseline", FULL), 2.0), (NOISE, own))
    ]
    noise = rows(lines)[1]
    assert noise.first_token == Quartiles(1.5, 1.0, 2.0)


def test_a_peer_is_also_set_against_its_own_full_cache(subject: BenchModel) -> None:
    cell = cell_of(subject)
    peer, its_full = ParticipantLabel("kvpress", "snapkv", "0.5"), ParticipantLabel("kvpress", FULL)
    lines = [
        record(ParticipantLabel("baseline", FULL), cell=cell, first=4.0, subject=subject),
        record(its_full, cell=cell, first=2.0, subject=subject),
        record(peer, cell=cell, first=1.0, subject=subject),
    ]
    assert rows(lines)[2].first_token == Quartiles(0.25, 0.25, 0.25)
    assert rows(lines[1:], "kvpress")[1].first_token == Quartiles(0.5, 0.5, 0.5)


@pytest.mark.slow
def test_table_and_picture_are_made(subject: BenchModel, tmp_path: Path) -> None:
    cells = [cell_of(subject, length=n) for n in (4096, 131072)]
    long = ParticipantLabel("kvfold", "kvzip:chunk=1000,level=uniform + kivi:bits=2", "0.05")
    lines = [
        record(label, cell=cell, index=i, first=123.456, steps=(0.0123,), peak=10, subject=subject)
        for cell in cells
        for i in range(2)
        for label in (ParticipantLabel("baseline", FULL), NOISE, SNAPKV, long)
    ]
    screen = console()
    screen.width = 100
    with screen.capture() as captured:
        for shown in tables(rows(lines)):
            screen.print(shown)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("full again") == 4 and "1.00 1.00-1.00" in text and "…" not in text
    drawn = figure(rows(lines))
    assert [panel.get_title("left") for panel in drawn.axes][:2] == [
        "time to first token", "time per token",
    ]  # fmt: skip
    drawn.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_names_with_dollars_as_they_are(
    subject: BenchModel, tmp_path: Path
) -> None:
    cell = cell_of(subject).model_copy(update={"name": r"models/$\a{$"})
    labels = (ParticipantLabel("baseline", FULL), ParticipantLabel("kvfold", r"duo:file=$\a{$"))
    lines = [record(label, cell=cell, first=1.0, subject=subject) for label in labels]
    figure(rows(lines)).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_seconds_of_the_first_graph_are_a_table_of_their_own(subject: BenchModel) -> None:
    cell, label = cell_of(subject), ParticipantLabel("kvfold", "snapkv", "0.5", compiled=True)
    lines = [record(label, cell=cell, index=i, subject=subject) for i in range(2)]
    assert len(tables(rows(lines))) == 1
    measured = lines[0].measured.model_copy(update={"graph_seconds": 7.25})
    lines[0] = lines[0].model_copy(update={"measured": measured})
    (row,) = rows(lines)
    assert row.graph_seconds == 7.25
    screen = console()
    with screen.capture() as captured:
        screen.print(tables([row])[1])
    assert "the first graph" in captured.get() and "7.2" in captured.get()


@pytest.mark.slow
def test_the_summary_as_json(tmp_path: Path, no_peak: None) -> None:
    result = bench(
        "tiny", "--method", "knorm", "--lengths", "40", "--new-tokens", "2", "--repeats", "1",
        "--out", str(tmp_path / "r.jsonl"), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = {row["label"]: row for row in json.loads(result.stdout)}
    knorm = next(row for label, row in rows.items() if label.startswith("knorm"))
    assert knorm["cell"]["length"] == 40 and knorm["kept"] == 9 / 41
    assert knorm["per_token"]["median"] > 0 and knorm["rounds"] == 1


def test_missing_is_counted_per_participant(subject: BenchModel) -> None:
    cell = cell_of(subject)
    other = cell.model_copy(update={"batch": 2})
    lines = [
        record(SNAPKV, cell=cell, subject=subject),
        record(SNAPKV, cell=other, subject=subject),
    ]
    assert session.missing_rounds(lines, cell, [NOISE, SNAPKV], 2) == {NOISE: 2, SNAPKV: 1}


def test_whole_answers_are_set_against_full_and_append(subject: BenchModel) -> None:
    cell, shape = cell_of(subject, length=64, new_tokens=4), subject.shape
    label = partial(ParticipantLabel, "kvfold")
    lines = [
        record(ParticipantLabel("baseline", FULL), cell=cell, steps=(4.0, 4.0, 4.0, 4.0),
               subject=subject),
        record(label("h2o", "30"), cell=cell, steps=(9.0,) * 4, subject=subject),
        record(label("knorm", "90"), cell=cell, steps=(9.0,) * 4, subject=subject),
        record(label("knorm", "30"), cell=cell, steps=(2.0,) * 4, subject=subject),
        record(label("snapkv", "30"), cell=cell, steps=(9.0,) * 4, subject=subject),
        # Three quick steps and a round: a median of steps would not see it.
        record(label("rkv + every:interval=10", "30"), cell=cell, steps=(1.0, 1.0, 1.0, 5.0),
               subject=subject),
    ]  # fmt: skip
    entry = 2 * shape.layers * shape.kv_heads * shape.head_size * 4
    measured = lines[-1].measured.model_copy(update={"largest_bytes": 50 * entry})
    lines[-1] = lines[-1].model_copy(update={"measured": measured})
    *others, own = rows(lines)
    assert own.per_token == Quartiles(0.25, 0.25, 0.25)
    assert own.answer == Quartiles(0.5, 0.5, 0.5) and own.append == Quartiles(1.0, 1.0, 1.0)
    assert own.largest == Quartiles(1.25, 1.25, 1.25)
    assert [row.append and row.append.median for row in others] == [None, 4.5, 1.0, 1.0, 4.5]
    assert not any(row.largest for row in others)
    screen = console()
    screen.width = 100
    with screen.capture() as captured:
        for shown in tables(rows(lines)):
            screen.print(shown)
    assert "and an answer of 4" in captured.get()


def test_the_largest_cache_is_that_before_a_round(
    subject: BenchModel, tmp_path: Path, no_peak: None
) -> None:
    cell = cell_of(subject, length=40, new_tokens=25)
    in_rounds = ParticipantLabel("kvfold", "knorm + every:interval=10", "30")
    made = session.BenchSession.of(subject, {}).rounds(
        cell, makers(subject, [in_rounds]), {in_rounds: 1}, lambda text: None
    )
    *_, own = rows([line for lines in made for line in lines])
    # 39 entries of 40, and the last one, for positions, and for room to grow.
    assert own.largest is not None and 0.95 < own.largest.median < 1.2
