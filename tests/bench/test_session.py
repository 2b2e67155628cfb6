# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: what is recorded, resumed and refused; that the full cache is the model's own.

Mechanics only: nothing here depends on how long anything takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CompileConfig
from typer.testing import CliRunner, Result

import kvfold
from kvfold.bench import counterparts, kvpress, kvpress_client, session, transformers_quantized
from kvfold.bench import participants as sides
from kvfold.bench.baseline import full_cache, full_twin, twin
from kvfold.bench.clock import Stopwatch, compression_watched
from kvfold.bench.lineup import labels, makers
from kvfold.bench.machine import MachineSetup
from kvfold.bench.models import BenchModel, FoldedTokenizer
from kvfold.bench.participants import (
    AGAIN,
    FULL,
    CompiledParticipant,
    FullParticipant,
    MethodParticipant,
    ParticipantLabel,
)
from kvfold.bench.peak import peak_of
from kvfold.bench.picture import figure
from kvfold.bench.record import BenchCell, Measurement, RoundRecord, check_setup
from kvfold.bench.sdpa_variants import SdpaChoice, SdpaVariant, fastest
from kvfold.bench.session import BenchSession, missing_rounds
from kvfold.bench.summary import Quartiles, rows
from kvfold.bench.table import tables
from kvfold.bench.throughput import BatchRun, ThroughputRecord, largest, sizes
from kvfold.cache.layer import CompressedLayer
from kvfold.cli import app
from kvfold.errors import KvfoldError
from kvfold.generation.static import decode as static_decode
from kvfold.generation.static.decode import compiling
from kvfold.hf import compiling as hf_compiling
from kvfold.jobs.records import RecordFile
from kvfold.terminal import console
from tests.helpers.models import build, continuation

SETUP = MachineSetup(
    cpu="this", cores=2, gpu=None, threads=1, python="3.11", versions={"kvfold": "0", "torch": "2"}
)
NOISE = ParticipantLabel("baseline", AGAIN)
SNAPKV = ParticipantLabel("kvfold", "snapkv", "0.5")


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    return BenchModel.of("tiny", "float32", 0)


@pytest.fixture
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each peak takes seconds: one test measures it, the others go without."""
    monkeypatch.setattr(sides, "can_measure", lambda: False)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of operations that run one by one, which are quick to make."""
    quick = CompileConfig(fullgraph=True, backend="eager", mode=None)
    monkeypatch.setattr(hf_compiling, "compile_config", lambda given: quick)
    monkeypatch.setattr(static_decode, "compile_config", lambda given: quick)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def cell_of(subject: BenchModel, length: int = 80, new_tokens: int = 3) -> BenchCell:
    return BenchCell(**subject.source.model_dump(), length=length, batch=1, new_tokens=new_tokens)


def record(
    label: ParticipantLabel,
    *,
    cell: BenchCell,
    name: str = "a",
    index: int = 0,
    first: float = 1.0,
    steps: tuple[float, ...] = (1.0, 1.0),
    nbytes: int = 100,
    peak: int | None = None,
    setup: MachineSetup = SETUP,
    subject: BenchModel,
) -> RoundRecord:
    measured = Measurement(
        prefill_seconds=first, compression_seconds=0.0, step_seconds=steps,
        seconds_per_token=steps[0], tokens_per_second=1 / steps[0], cache_bytes=nbytes, kept=1.0,
        peak_bytes=peak,
    )  # fmt: skip
    return RoundRecord(
        session=name, round=index, at="now", side=label.side, method=label.method,
        budget=label.budget, baseline="sdpa", shape=subject.shape, setup=setup, commit=None,
        cell=cell, measured=measured,
    )  # fmt: skip


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "100"})


def refused(*arguments: str) -> str:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: ")
    return message


# --- the full cache -------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["packed", "grouped"])
@pytest.mark.parametrize("prefill", ["repeated", "grouped"])
def test_the_baseline_gives_the_model_s_own_logits(prefill: Any, decode: Any) -> None:
    model = build("llama")
    eager = build("llama")
    eager.set_attn_implementation("eager")
    fast = full_twin(model, SdpaChoice(SdpaVariant(prefill), SdpaVariant(decode)))
    cache = full_cache(fast, room=6)
    ids = continuation(2, 40)
    # The prompt, one token, three at once (which need a mask), and one more.
    for start, stop in ((0, 33), (33, 34), (34, 37), (37, 38)):
        out = fast(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        expected = eager(input_ids=ids[:, :stop]).logits[:, start:]
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=2e-5)
    assert model.config._attn_implementation == "sdpa"


def test_the_baseline_packs_query_heads_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[tuple[int, ...], ...]] = []
    own = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert not options.get("enable_gqa")
        shapes.append((tuple(query.shape), tuple(key.shape)))
        return own(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model = full_twin(build("llama"), SdpaChoice(SdpaVariant("repeated"), SdpaVariant("packed")))
    cache = full_cache(model, room=2)
    model(input_ids=continuation(3, 20), past_key_values=cache, use_cache=True)
    shapes.clear()
    model(input_ids=continuation(3, 1), past_key_values=cache, use_cache=True)
    # 8 query heads over 2 KV heads of 8: four rows attend to each KV head's keys, uncopied.
    assert shapes == [((3, 2, 4, 8), (3, 2, 21, 8))] * 4


def test_the_full_cache_has_room_for_the_tokens_that_come() -> None:
    model = full_twin(build("llama"), SdpaChoice())
    cache = full_cache(model, room=5)
    model(input_ids=continuation(1, 20), past_key_values=cache, use_cache=True)
    before = [layer.grown[0].rows.data_ptr() for layer in cache.layers]
    for _ in range(5):
        model(input_ids=continuation(1, 1), past_key_values=cache, use_cache=True)
    assert [layer.grown[0].rows.data_ptr() for layer in cache.layers] == before
    # 25 tokens, 2 heads of 8 numbers, keys and values, 4 bytes.
    assert [layer.nbytes() for layer in cache.layers] == [25 * 2 * 8 * 2 * 4] * 4


def test_a_twin_shares_weights_and_nothing_else() -> None:
    model = build("llama")
    kvfold.enable(model)
    other = twin(model)
    for own, shared in zip(model.parameters(), other.parameters(), strict=True):
        assert own is shared
    assert other.config is not model.config
    assert model.config._attn_implementation == "kvfold"
    assert other.config._attn_implementation == "sdpa"


def test_the_fastest_kernels_are_named() -> None:
    kernels = fastest(build("llama"), 1, 16)
    assert kernels.prefill.layout in ("repeated", "grouped")
    assert kernels.decode.layout in ("packed", "grouped")
    assert (
        str(SdpaChoice()) == "prefill sdpa, keys repeated; decode sdpa, query heads packed as rows"
    )


# --- time -----------------------------------------------------------------------------------


def test_time_inside_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(moments)))
    watch = Stopwatch(torch.device("cpu"))
    inner = watch.watched(lambda: None)
    outer = watch.watched(lambda: [inner(), inner()])
    outer()
    inner()
    assert watch.total() == 2.0


def test_compression_is_told_from_prefill(subject: BenchModel) -> None:
    before = (CompressedLayer.finish, CompressedLayer.end_reading)
    ids = subject.tokens(1, 80)
    full = FullParticipant(subject, SdpaChoice()).prefill(ids, 1)
    assert full.compression == 0.0
    for method in ("snapkv", "kvzip"):
        taken = MethodParticipant(subject, method, "0.5").prefill(ids, 1)
        assert 0 < taken.compression < taken.seconds
    assert (CompressedLayer.finish, CompressedLayer.end_reading) == before


def test_what_is_watched_is_restored_after_an_error() -> None:
    before = CompressedLayer.finish
    with pytest.raises(RuntimeError), compression_watched(torch.device("cpu")):
        raise RuntimeError
    assert CompressedLayer.finish is before


# --- participants ---------------------------------------------------------------------------


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


# --- records --------------------------------------------------------------------------------


def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path: Path, subject: BenchModel) -> None:
    path, cell = tmp_path / "r.jsonl", cell_of(subject)
    store = RecordFile(path, RoundRecord)
    store.add([record(NOISE, cell=cell, subject=subject)])
    whole = path.read_bytes()
    for length in (1, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        loaded = store.load()
        assert (len(loaded.records), loaded.torn) == (1, length)
        assert path.read_bytes() == whole
    store.add([record(SNAPKV, cell=cell, subject=subject)])
    assert [r.label for r in store.load().records] == [NOISE, SNAPKV]
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"a": 1}\n', '{"a"'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(KvfoldError, match=r"line 1 of .* is no record"):
        RecordFile(path, RoundRecord).load()
    assert path.read_text() == text


def test_records_of_another_machine_are_refused(subject: BenchModel, tmp_path: Path) -> None:
    versions = {"kvfold": "0", "torch": "1"}
    other = SETUP.model_copy(update={"threads": 2, "versions": versions})
    theirs = record(SNAPKV, cell=cell_of(subject), setup=other, subject=subject)
    check_setup([theirs], {"kvfold": other}, tmp_path)
    with pytest.raises(KvfoldError) as refusal:
        check_setup([theirs], {"kvfold": SETUP}, tmp_path)
    assert "threads is 1, there 2" in str(refusal.value)
    assert "torch is 2, there 1" in str(refusal.value)


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


# --- the command ----------------------------------------------------------------------------


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


@pytest.mark.slow
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
    made = [r.label for r in RecordFile(out, RoundRecord).load().records if r.side == "kvfold"]
    eager = [
        ParticipantLabel("kvfold", "h2o", "0.2"),
        ParticipantLabel("kvfold", "streaming_llm", "0.2"),
    ]
    assert made == [*eager, ParticipantLabel("kvfold", "h2o", "0.2", compiled=True)]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_peak_is_measured_in_a_process_of_its_own(subject: BenchModel) -> None:
    side = FullParticipant(subject, SdpaChoice())
    # 4 KiB of queries, keys and values a token are the least that a prompt of 4096 takes.
    assert peak_of(side.spec(), 1, 4096, 1) > 2**20
    with pytest.raises(KvfoldError, match=r"cannot measure the peak of nothing: .*unknown method"):
        peak_of(side.spec() | {"side": "kvfold", "method": "nothing"}, 1, 16, 1)


# --- peers ----------------------------------------------------------------------------------


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
    for method, budget in (
        (FULL, None),
        ("d2o", "0.2"),
        ("snapkv", "1MiB"),
        ("snapkv + kivi", "0.2"),
    ):
        assert press(method, budget) is None


STAND_IN = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    do = request["do"]
    answer = {
        "hello": {"versions": {"kvpress": "0"}},
        "build": {"check": json.loads(os.environ.get("CHECK", "[]"))},
        "prefill": {"seconds": 2.0, "compression": 0.5, "peak": None},
        "step": {"seconds": 0.25},
        "cache_size": {"nbytes": 1000, "kept": 0.5},
        "free": {},
    }.get(do, {"error": "no " + do})
    if request.get("press") == ["KnormPress", {"compression_ratio": 0.5}]:
        sys.exit("out of memory")
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: BenchModel, no_peak: None
) -> Iterator[kvpress.KvpressPeer]:
    """A peer's process that answers without doing anything."""
    script = tmp_path / "peer.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(kvpress_client, "SCRIPT", script)
    monkeypatch.setattr(kvpress, "can_measure", lambda: False)
    last = sorted(subject.model.named_parameters())[-1][1].detach()
    monkeypatch.setenv("CHECK", json.dumps(last.flatten()[:8].double().tolist()))
    peer = kvpress.KvpressPeer(subject, Path(sys.executable))
    yield peer
    peer.close()


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


# --- throughput -----------------------------------------------------------------------------


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


def test_missing_is_counted_per_participant(subject: BenchModel) -> None:
    cell = cell_of(subject)
    other = cell.model_copy(update={"batch": 2})
    lines = [
        record(SNAPKV, cell=cell, subject=subject),
        record(SNAPKV, cell=other, subject=subject),
    ]
    assert session.missing_rounds(lines, cell, [NOISE, SNAPKV], 2) == {NOISE: 2, SNAPKV: 1}
