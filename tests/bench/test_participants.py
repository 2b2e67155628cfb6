# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a benchmark, compiled or eager, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.bench import transformers_quantized
from kvfold.bench.lineup import labels, makers
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import (
    CompiledParticipant,
    FullParticipant,
    MethodParticipant,
    ParticipantLabel,
)
from kvfold.bench.record import RoundRecord
from kvfold.bench.sdpa_variants import SdpaChoice, SdpaVariant, fastest
from kvfold.cache.layer import CompressedLayer
from kvfold.errors import KvfoldError
from kvfold.evidence.records import RecordFile
from kvfold.fitted.file import read_scorer_file
from kvfold.generation.static.compiler import compiling
from tests.helpers.benchmarks import bench
from tests.helpers.models import build


def test_the_fastest_kernels_are_named() -> None:
    kernels = fastest(build("llama"), 1, 16)
    assert kernels.prefill.layout in ("repeated", "grouped")
    assert kernels.decode.layout in ("packed", "grouped")
    assert (
        str(SdpaChoice()) == "prefill sdpa, keys repeated; decode sdpa, query heads packed as rows"
    )


def test_a_kernel_without_memory_is_not_the_fastest(monkeypatch) -> None:
    attend = SdpaVariant.attend

    def attends(self: SdpaVariant, *arguments: Any) -> Any:
        if self.layout in ("repeated", "packed"):
            raise torch.OutOfMemoryError
        return attend(self, *arguments)

    monkeypatch.setattr(SdpaVariant, "attend", attends)
    kernels = fastest(build("llama"), 1, 16)
    assert kernels == SdpaChoice(SdpaVariant("grouped"), SdpaVariant("grouped"))


def test_labels_have_a_budget_where_the_method_takes_one() -> None:
    found = labels(["snapkv", "simlayerkv", "snapkv:window=32"], ["0.2", "64"])
    assert [str(label) for label in found] == ["snapkv, 0.2", "snapkv, 64", "simlayerkv"]
    with pytest.raises(KvfoldError, match="unknown method"):
        labels(["snapkw"], ["0.2"])
    with pytest.raises(KvfoldError, match="cannot read"):
        labels(["snapkv"], ["much"])


def test_a_participant_that_cannot_work_is_refused_before_the_run(subject: BenchModel) -> None:
    with pytest.raises(KvfoldError, match="at least 32"):
        makers(subject, [ParticipantLabel("kvfold", "snapkv", "5")])


@pytest.mark.whole
def test_compiled_sides_take_part_beside_eager_ones(
    tmp_path: Path, no_peak: None, one_by_one: None
) -> None:
    out = tmp_path / "r.jsonl"
    result = bench(
        "tiny", "--method", "h2o", "--method", "streaming_llm", "--compile", "--lengths", "80",
        "--new-tokens", "2", "--repeats", "1", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "left out: streaming_llm, 0.2, compiled:" in printed and "moves its sinks" in printed
    records = RecordFile(out, RoundRecord).load().records
    made = [record.label for record in records if record.side == "kvfold"]
    eager = [
        ParticipantLabel("kvfold", "h2o", "0.2"),
        ParticipantLabel("kvfold", "streaming_llm", "0.2"),
    ]
    assert made == [*eager, ParticipantLabel("kvfold", "h2o", "0.2", compiled=True)]
    told = {record.label: record.measured.graph_seconds for record in records}
    assert told[made[-1]] > 0 and not any(told[label] for label in eager)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "method", ["h2o", "snapkv", "adakv", "full", "kivi:group=16", "think", "minicache"]
)
def test_a_compiled_side_holds_what_an_eager_one_does(
    subject: BenchModel, one_by_one: None, method: str
) -> None:
    sized = method in ("h2o", "snapkv", "adakv")
    budget, ids = "0.9" if sized else None, subject.tokens(1, 430)
    eager, compiled = (
        kind(subject, method, budget) for kind in (MethodParticipant, CompiledParticipant)
    )
    with compiling():
        for side in (eager, compiled):
            side.prefill(ids[:, :400], 30)
            for index in range(400, 430):
                assert side.step(ids[:, index : index + 1]) > 0
    # Room for 16 or 30 entries, and what says where they are, may differ.
    assert compiled.cache_size().nbytes == pytest.approx(eager.cache_size().nbytes, rel=0.1)
    assert compiled.peak_alone(1, 80, 30) is None
    compiled.graph_cache.hand_back()
    for layer in range(len(eager.cache.states)):
        for mine, theirs in zip(
            compiled.cache.positions(layer)[0], eager.cache.positions(layer)[0], strict=True
        ):
            assert torch.equal(mine, theirs)


def test_the_quantized_cache_needs_a_backend(
    subject: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvfoldError, match="pip install optimum-quanto"):
        transformers_quantized.QuantizedPeer(subject)


def test_bytes_of_quantized_layers_count_each_storage_once() -> None:
    shared = torch.zeros(10, dtype=torch.uint8)
    held = {"a": shared, "b": [shared[2:], (torch.zeros(3), {"c": torch.zeros(2)})], "d": 4}
    assert transformers_quantized.tensor_bytes(held, set()) == 10 + 12 + 8


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zap", "zap:level=uniform", "zap_threshold:threshold=0"])
def test_zap_runs_on_random_weights_by_a_scorer_of_their_shape(
    subject: BenchModel, method: str
) -> None:
    """By the seed, so that the process that measures the peak makes the same one."""
    budget = None if "threshold" in method else "0.5"
    one, other = (MethodParticipant(subject, method, budget) for _ in range(2))
    for participant in (one, other):
        participant.prefill(subject.tokens(1, 64), 1)

    assert one.label.method == method
    assert one.cache_size() == other.cache_size() and 0.2 < one.cache_size().kept <= 1
    assert read_scorer_file(one.method.file)[1].keys() > {"weights", "scales", "projections"}


def test_zap_of_a_loaded_model_reads_its_own_scorer() -> None:
    subject = BenchModel.of("bundled", None, 0)

    assert str(MethodParticipant(subject, "zap", "0.5").method) == "zap"
    with pytest.raises(KvfoldError, match="cannot read nowhere"):
        MethodParticipant(BenchModel.of("tiny", "float32", 0), "zap:file=nowhere", "0.5")


def test_compression_is_told_from_prefill(subject: BenchModel) -> None:
    before = (CompressedLayer.finish, CompressedLayer.end_reading)
    ids = subject.tokens(1, 80)
    full = FullParticipant(subject, SdpaChoice()).prefill(ids, 1)
    assert full.compression == 0.0
    for method in ("snapkv", "kvzip"):
        taken = MethodParticipant(subject, method, "0.5").prefill(ids, 1)
        assert 0 < taken.compression < taken.seconds
    assert (CompressedLayer.finish, CompressedLayer.end_reading) == before
