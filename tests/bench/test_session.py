# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: what is recorded, resumed and refused; that the full cache is the model's own.

Mechanics only: nothing here depends on how long anything takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvfold.bench.lineup import makers
from kvfold.bench.models import BenchModel, FoldedTokenizer
from kvfold.bench.participants import AGAIN, FULL, ParticipantLabel
from kvfold.bench.record import RoundRecord
from kvfold.bench.session import BenchSession, missing_rounds
from kvfold.evidence.records import RecordFile
from tests.helpers.benchmarks import bench, cell_of, refused

NOISE = ParticipantLabel("baseline", AGAIN)
SNAPKV = ParticipantLabel("kvfold", "snapkv", "0.5")


def test_a_random_model_s_tokenizer_stays_inside_its_vocabulary(subject: BenchModel) -> None:
    assert isinstance(subject.tokenizer, FoldedTokenizer)
    ids = subject.tokenizer("The quick brown fox", add_special_tokens=False, return_tensors="pt")
    assert int(ids.input_ids.max()) < subject.shape.vocabulary
    assert subject.tokenizer.chat_template


def test_the_same_seed_makes_the_same_model_and_prompt(subject: BenchModel) -> None:
    again = BenchModel.of("tiny", "float32", 0)
    for own, other in zip(subject.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(subject.tokens(2, 9), again.tokens(2, 9))
    # A longer prompt of one row goes on from a shorter one.
    assert torch.equal(subject.tokens(1, 9)[:, :5], subject.tokens(1, 5))


def test_a_killed_run_goes_on_where_it_stopped(
    subject: BenchModel, tmp_path: Path, no_peak: None
) -> None:
    store, cell = RecordFile(tmp_path / "r.jsonl", RoundRecord), cell_of(subject)
    made = makers(subject, [SNAPKV])
    everyone = [NOISE, *made]

    class Killed(Exception):
        pass

    def killed_in_round_two(text: str) -> None:
        if "round 2" in text and "token 2" in text:
            raise Killed

    def run(note: Callable[[str], None]) -> None:
        missing = missing_rounds(store.load().records, cell, everyone, 3)
        for line in BenchSession.of(subject, {}).rounds(cell, made, missing, note):
            store.add(line)

    with pytest.raises(Killed):
        run(killed_in_round_two)
    first = store.path.read_bytes()
    assert [r.method for r in store.load().records] == [FULL, AGAIN, "snapkv"]
    run(lambda text: None)
    records = store.load().records
    assert store.path.read_bytes().startswith(first)
    assert [r.label for r in records].count(SNAPKV) == 3
    assert len({r.session for r in records}) == 2
    assert missing_rounds(records, cell, everyone, 3) == {}
    # A method that is new to the file runs alone with a full cache of its own session.
    extra = ParticipantLabel("kvfold", "knorm", "0.5")
    assert missing_rounds(records, cell, [*everyone, extra], 3) == {extra: 3}


@pytest.mark.slow
def test_the_command_records_shows_and_goes_on(tmp_path: Path, no_peak: None) -> None:
    out = tmp_path / "deep" / "r.jsonl"
    work = ("tiny", "--method", "kvzip", "--method", "simlayerkv", "--lengths",
            "80 96", "--new-tokens", "2", "--budgets", "0.5", "--out", str(out))  # fmt: skip
    result = bench(*work, "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert "kvzip, 0.5" in result.output and "full again" in result.output
    assert out.with_suffix(".png").exists()
    before = out.read_bytes()
    lines = [json.loads(line) for line in before.splitlines()]
    assert [(r["cell"]["length"], r["method"]) for r in lines] == [
        (length, method) for length in (80, 96) for method in (FULL, AGAIN, "kvzip", "simlayerkv")
    ]
    assert all(len(r["measured"]["step_seconds"]) == 2 for r in lines)
    assert all(r["measured"]["cache_bytes"] > 0 for r in lines)
    assert lines[0]["setup"]["versions"]["torch"] == torch.__version__
    assert lines[0]["baseline"].startswith("prefill sdpa")
    # Nothing is left to run; then one more round is.
    printed = bench(*work, "--repeats", "1").output
    assert "8 records already" in " ".join(printed.split())
    assert out.read_bytes() == before
    out.write_bytes(before + before[:40])
    again = bench(*work, "--repeats", "2")
    assert "dropped a last line of 40 bytes" in again.output
    assert out.read_bytes().startswith(before)
    assert len(out.read_bytes().splitlines()) == 16
    threads = torch.get_num_threads()
    try:
        assert f"threads is {threads + 1}, there {threads}" in refused(
            *work, "--threads", str(threads + 1)
        )
    finally:
        torch.set_num_threads(threads)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    tiny = ("tiny", "--out", str(tmp_path / "r.jsonl"))
    assert "unknown dtype 'float8'" in refused(*tiny, "--dtype", "float8")
    assert "no positive whole number" in refused(*tiny, "--lengths", "4k")
    assert "an empty list" in refused(*tiny, "--batches", " ")
    assert "unknown peer 'vllm'" in refused(*tiny, "--peer", "vllm")
    assert "--peer-python" in refused(*tiny, "--peer", "kvpress")
    assert "cannot run" in refused(*tiny, "--peer", "kvpress", "--peer-python", "/no/python")
    assert "prompt+generation" in refused(*tiny, "--throughput", "4096")
    assert "leave out --compile" in refused(*tiny, "--throughput", "64+64", "--compile")
    assert not (tmp_path / "r.jsonl").exists()
