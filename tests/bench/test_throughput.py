# SPDX-License-Identifier: Apache-2.0
"""The largest batch below a cap of bytes, and its throughput."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import FULL, MethodParticipant
from kvfold.bench.throughput import BatchRun, ThroughputRecord, largest, sizes
from kvfold.errors import KvfoldError
from kvfold.evidence.records import RecordFile
from tests.helpers.benchmarks import bench


@pytest.mark.parametrize("fixed", [-30, 0, 25, 90])
@pytest.mark.parametrize("room", [100, 399, 400, 1234])
def test_the_largest_batch_is_found(fixed: int, room: int) -> None:
    def bytes_of(batch: int) -> int:
        return 100 * batch + (0 if batch == 1 else fixed) - 7 * (batch % 2)

    def run(batch: int) -> BatchRun:
        return BatchRun(
            batch=batch, cache_bytes=bytes_of(batch), prefill_seconds=1, decode_seconds=1,
            tokens_per_second=batch,
        )  # fmt: skip

    found = largest(run, room).batch
    assert bytes_of(found) <= room
    assert bytes_of(found + 1) > room


def test_a_cap_below_one_row_is_refused() -> None:
    one = BatchRun(
        batch=1, cache_bytes=100, prefill_seconds=1, decode_seconds=1, tokens_per_second=1
    )
    with pytest.raises(KvfoldError, match="raise it"):
        largest(lambda batch: one, 99)


@pytest.mark.slow
def test_throughput_stays_below_the_cap_and_the_next_row_would_not(
    tmp_path: Path, subject: BenchModel
) -> None:
    out = tmp_path / "t.jsonl"
    work = ("tiny", "--dtype", "float32", "--throughput", "24+40", "--method", "full", "--method",
            "h2o", "--memory-cap", "700KiB", "--out", str(out), "--repeats", "1")  # fmt: skip
    result = bench(*work)
    assert result.exit_code == 0, result.output
    assert "weights and cache in 700.0 KiB" in result.output
    lines = {r.method: r for r in RecordFile(out, ThroughputRecord).load().records}
    assert set(lines) == {FULL, "h2o"}
    assert lines["h2o"].budget == "24"
    room = 700 * 1024 - subject.shape.weight_bytes
    # 2 layers, 2 KV heads of 16, keys and values in float32, 64 tokens in all.
    row = 2 * 2 * 16 * 2 * 4 * 64
    assert lines[FULL].outcome.cache_bytes == lines[FULL].outcome.batch * row
    assert lines[FULL].outcome.batch == room // row
    more = next_batch_bytes(subject, lines["h2o"])
    assert lines["h2o"].outcome.cache_bytes <= room < more
    before = out.read_bytes()
    said = json.loads(bench(*work, "--json").stdout)
    assert said == [json.loads(line) for line in before.decode().splitlines()]
    assert out.read_bytes() == before


def next_batch_bytes(subject: BenchModel, line: ThroughputRecord) -> int:
    """The most that the cache holds with one row more."""
    side = MethodParticipant(subject, line.method, line.budget)
    ids = subject.tokens(line.outcome.batch + 1, 64)
    side.prefill(ids[:, :24], 40)
    held = [side.cache_size().nbytes]
    for index in range(24, 64):
        side.step(ids[:, index : index + 1])
        held.append(side.cache_size().nbytes)
    return max(held)


def test_sizes_are_read() -> None:
    assert sizes("256+1024") == (256, 1024)
    for wrong in ("256", "0+5", "a+b", "5+"):
        with pytest.raises(KvfoldError, match="prompt\\+generation"):
            sizes(wrong)
