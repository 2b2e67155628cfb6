# SPDX-License-Identifier: Apache-2.0
"""The really trained model's result pages: made of records alone, also of a part of the run."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

import kvfold
from docs.generate import publish_real, real_left
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import FULL, EvalCell, EvalProtocol
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.read_files import digests
from kvfold.eval.run.run_folder import samples_file
from kvfold.eval.run.sample_result import CacheUsage, SampleOutcome, SampleResult, ScoredAnswer
from kvfold.eval.tasks import tasks
from kvfold.methods.base import parse
from kvfold.methods.registry import listed
from kvfold.report.board import boards
from kvfold.report.load import load_results
from kvfold.report.style import BASELINES
from kvfold.report.tables import by_task, markdown
from real_model.models import SMOLLM2
from tests.helpers.reports import HERE, MODEL, made

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
FRONT = "# kvfold\n\n<!-- made by docs/generate/publish_real.py -->\n<!-- end -->\n\nmore\n"
BEFORE, VIEW = "before the question is known", "with the question in view"
NOISE, NOVEL = "ruler_niah_single_1", "ruler_niah_single_2"  # which all methods are run on
SEVERAL = {"kvzip", "pyramidkv", "snapkv", "d2o", "h2o", "streaming_llm"}  # lines of the picture
FITS = {"zap": "scorer", "qfilter": "filters", "duo": "heads", "snapkv + curve": "curve"}
# Registered names that the leaderboard does not run.
LEFT_OUT = {
    "criticalkv": "measured before it added epsilon to means, as criticalkv_summed does to sums",
    "every": "rounds while an answer is written: the same prompt as without",
    "fair": "needs the spans of images, or of one's own",
    "pages": "rounds what another method keeps to whole pages",
    "sizes": "takes a file or parts of one's own",
    "triattention": "keeps the prompt, and evicts answers: docs/answering-long.md",
    "triattention_official": "the same",
}
NARROW, SMALLEST = 390, 11  # pixels of a small screen, and of a letter on it


@pytest.fixture
def publishing() -> ModuleType:
    return publish_real


def measured() -> list[CellResult]:
    """Two protocols: the full cache, three methods at a fifth and at half, one without a budget."""
    results = []
    for aware in (False, True):
        for task in (NOISE, NOVEL):
            known = {
                "task": task,
                "aware": aware,
                "haystack": "book.txt",
                "metric": "string_match_all",
            }
            results.append(made(score=(98.0, 1.0), **known))
            best, other = ("snapkv", "kvzip") if aware else ("kvzip", "snapkv")
            results.append(made(best, "0.2", (91.0, 1.0), (-7.0, -9.0, -5.0), **known))
            results.append(made(other, "0.2", (31.0, 1.0), (-67.0, -69.0, -65.0), **known))
            results.append(made(other, "0.5", (97.0, 1.0), (-1.0, -2.0, 0.0), **known))
            results.append(made("random", "0.2", (95.0, 1.0), (-3.0, -4.0, -2.0), **known))
            results.append(made("dbudgetkv", None, (96.0, 1.0), (-2.0, -3.0, -1.0), **known))
    return results


def sample(method: str, budget: str | None, index: int, right: bool) -> SampleResult:
    """A line of a run's file; the model is named by its folder."""
    subject = MODEL.model_copy(update={"name": "/home/someone/.models/smollm2"})
    kept = float(budget or 1)
    return SampleResult(
        cell=EvalCell(
            subject=subject, task="ruler_niah_single_2", length=1024, seed=0, data=("book.txt",),
            protocol=EvalProtocol(max_length=2048), method=method, budget=budget,
        ),
        index=index,
        text="t",
        outcome=SampleOutcome(
            answers=(ScoredAnswer(
                prediction="long " * 99, tokens=9, ended="end",
                scores={"string_match_all": float(right)},
            ),),
            tokens=900, left_out=0, prefill_seconds=1.0, answer_seconds=1.0,
            held=CacheUsage(
                seen=900, kept=kept, kept_per_layer=(kept,), nbytes=int(900 * kept),
                nbytes_full=900, peak_bytes=None,
            ),
        ),
        error=None,
        metadata={"haystack": "book.txt"},
        at="2026-01-01T00:00:00+00:00",
        commit="abc",
        setup=HERE,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder while it goes on: its last line is half written."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [
        sample(method, budget, index, right)
        for index in range(4)
        for method, budget, right in (
            ("full", None, True), ("kvzip", "0.2", index > 0), ("h2o", "0.2", False),
        )
    ]  # fmt: skip
    samples_file(folder).add(lines)
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"cell":{"sub')
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that are written to."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(FRONT, encoding="utf-8")
    return tmp_path


def tables(page: str) -> list[tuple[str, str]]:
    """Each table's header and the paragraph above it."""
    parts = page.split("\n\n")
    return [
        (part.splitlines()[0], parts[number - 1])
        for number, part in enumerate(parts)
        if part.startswith("| ")
    ]


def breakable(text: str) -> str:
    """Text with plain spaces before percent signs."""
    return text.replace("\u00a0", " ")


def published() -> Sequence[CellResult]:
    file = RESULTS / "records.jsonl"
    return load_results([file]) if file.is_file() else []


@pytest.mark.whole
def test_the_published_page_is_that_of_the_records(publishing: ModuleType) -> None:
    page, front = RESULTS / "README.md", (ROOT / "README.md").read_text(encoding="utf-8")
    results = published()

    made_page = publishing.real_page.page(results, publishing.planned())
    assert page.read_text(encoding="utf-8") == made_page
    assert publishing.real_page.readme(front, results) == front
    assert ("Not run yet." in made_page) == (not results)


@pytest.mark.whole
@pytest.mark.skipif(not published(), reason="no records of the really trained model yet")
def test_published_tables_are_those_of_the_records() -> None:
    every = boards(published())

    assert (RESULTS / "report.md").read_text(encoding="utf-8") == markdown(every)
    assert (RESULTS / "tasks.md").read_text(encoding="utf-8") == by_task(every)


def test_fitted_methods_were_run_with_the_fits_that_make_real_brings() -> None:
    ours = {
        digest
        for method, file in FITS.items()
        for digest in digests(f"{method}:file={SMOLLM2.fitted / file}.safetensors")
    }
    found = {
        digest for one in load_results([RESULTS / "records.jsonl"]) for digest in one.cell.files
    }
    assert found == ours


def test_a_stranger_reads_what_a_fifth_of_the_cache_answers(publishing: ModuleType) -> None:
    said = breakable(publishing.real_page.summary(measured())).splitlines()

    assert said[0] == (
        "SmolLM2-135M-Instruct looks for a 7-digit number hidden in 1024 tokens, with a fifth of "
        "the cache's entries (20 % of its bytes; KVzip also keeps the chat template). An answer "
        "counts only with all digits:"
    )
    assert said[2:] == [
        f"- **{when}**, {best} finds **91 %**; the best other method, {other}, 31 %; the full "
        "cache 98 % (200 samples)."
        for when, best, other in (
            (BEFORE.capitalize(), "KVzip", "SnapKV"),
            (VIEW.capitalize(), "SnapKV", "KVzip"),
        )
    ]


def changed(one: CellResult, method: str, **more: object) -> CellResult:
    """The record of another method."""
    return one.model_copy(update={"cell": one.cell.model_copy(update={"method": method})} | more)


def test_methods_of_the_best_score_share_the_headline(publishing: ModuleType) -> None:
    results = measured()
    tied = [
        changed(one, name, nbytes=nbytes)
        for one in results
        if one.cell.method == "kvzip" and not one.cell.protocol.question_aware
        for name, nbytes in (("d2o", 240.0), ("zap", 260.0))
    ]

    said = breakable(publishing.real_page.summary(results + tied))

    assert "KVzip, D2O and zap (after a fit) find **91 %**; the best other" in said
    assert "(20 to 26 % of its bytes; KVzip" in said


def test_the_next_best_is_that_of_all_methods_and_names_other_samples(
    publishing: ModuleType,
) -> None:
    results = measured()
    beside = [
        changed(one, "leverage", score=one.score.model_copy(update={"value": 82.5}), samples=20)
        for one in results
        if one.cell.method == "snapkv" and one.cell.budget == "0.2" and one.score
    ]

    said = breakable(publishing.real_page.summary(results + beside))
    assert "the best other method, `leverage`, 82.5 % (40 samples); the full" in said
    page = publishing.real_page.page(results + beside, [])
    assert "| leverage | 82.5 | 82.5 | 82.5 |" in page and "| 20 + 20 |" in page


def drawing(publishing: ModuleType, results: Sequence[CellResult]) -> Figure:
    drawn = Figure()
    publishing.real_picture._draw(drawn, boards(results))
    return drawn


def test_no_mean_hides_that_a_task_is_solved_and_another_fails(publishing: ModuleType) -> None:
    results = [
        one.model_copy(update={"score": one.score.model_copy(update={"value": value})})
        if one.cell.method == "kvzip" and one.cell.budget == "0.2" and one.score
        else one
        for one in measured()
        for value in [100.0 if one.cell.task == NOISE else 0.0]
    ]
    assert "| kvzip | 100.0 | 0.0 | 50.0 |" in publishing.real_page.page(results, [])

    drawn = drawing(publishing, results)
    bars = [
        [tuple(y for _, y in segment) for segment in bar.get_segments()]
        for bar in drawn.axes[0].collections
    ]
    assert [(0.0, 100.0)] in bars


def test_every_table_names_its_haystack(publishing: ModuleType) -> None:
    found = tables(publishing.real_page.page(measured(), publishing.planned()))

    assert len(found) == 4
    for header, above in found:
        assert above == f"Haystack: book.txt ({NOISE}, {NOVEL})."
        assert header.count("|") <= 11  # as wide as a laptop


def test_samples_of_a_gpu_are_told_apart(publishing: ModuleType) -> None:
    results = measured()
    assert "operations are counted" not in publishing.real_page.page(results, [])
    there = HERE.model_copy(update={"gpu": "NVIDIA H200"})
    results[3] = results[3].model_copy(update={"setups": (HERE, there)})
    page = publishing.real_page.page(results, [])
    assert "NVIDIA H200" in page and "Of samples read on a GPU no operations are counted" in page


def test_a_method_that_lacks_a_task_is_in_no_mean(publishing: ModuleType) -> None:
    late = made("tova", "0.2", (99.0, 1.0), (1.0, 0.0, 2.0), task=NOISE, haystack="book.txt")
    page = publishing.real_page.page([*measured(), late], [])

    assert "Methods run in one haystack only: 1 ([tasks.md](tasks.md))." in page
    assert "| tova" not in page


@pytest.mark.slow
def test_means_are_of_the_needles_that_every_method_is_run_on(publishing: ModuleType) -> None:
    """Another length with one method neither changes the means nor leaves the others out."""
    known = {"task": NOISE, "length": 2048, "haystack": "book.txt", "metric": "string_match_all"}
    longer = [made(score=(50.0, 1.0), **known), made("kvzip", "0.2", (40.0, 1.0), **known)]
    real = publishing.real_page

    assert real.summary([*measured(), *longer]) == real.summary(measured())
    page, without = (real.page(each, []) for each in ([*measured(), *longer], measured()))
    more = page.replace(without.split("## With")[0], "").splitlines()
    assert "| method | noise, 2048 |" in more
    assert "| full cache | 50.0 |" in more and "| KVzip | 40.0 |" in more


def test_what_has_not_been_run_is_named(publishing: ModuleType) -> None:
    def planned(task: str, samples: int, scored: bool = True, length: int = 1024):
        real = publishing.real_page
        contenders = frozenset({("full", None), ("kvzip", "0.2")})
        return real.Planned(real.Unit(task, length, False), samples, contenders, scored)

    other = made(task="ruler_niah_single_3", score=(75.0, 1.0), samples=20, haystack="book.txt")
    plan = [planned(NOISE, 100), planned(NOVEL, 140), planned("ruler_niah_single_3", 40)]
    plan += [planned(NOISE, 10, length=2048), planned("c", 10), planned("d", 10, False)]
    page = publishing.real_page.page([*measured(), other], plan)

    assert (
        "Of the plan, 17 % is done (2 of 12 cells). Longer than 1024 tokens: nothing yet." in page
    )
    assert "| method | UUIDs, 1024 |\n| --- | ---: |\n| samples | 20 of 40 |" in page
    assert f"Not run yet {BEFORE}: noise (2048), c (1024)." in page  # d is a perplexity
    assert "Of the plan" not in publishing.real_page.page(measured(), plan[:1])


def test_answers_that_are_cut_off_are_told(publishing: ModuleType) -> None:
    def of(task: str, value: float, most: int, cut: int) -> CellResult:
        one = made(task=task, score=(value, 1.0), at_limit=cut, haystack="book.txt")
        protocol = one.cell.protocol.model_copy(update={"answer_tokens": most})
        cell = one.cell.model_copy(update={"protocol": protocol})
        return one.model_copy(update={"cell": cell})

    results = [of(NOISE, 100.0, 16, 40), of(NOVEL, 100.0, 16, 0)]
    results.append(of("ruler_niah_single_3", 75.0, 48, 33))
    page = publishing.real_page.page(results, [])

    assert (
        "- Answers end at 16 tokens (noise, novel) and 48 tokens (UUIDs), finished or not." in page
    )
    assert (
        "- UUIDs: 33 of the full cache's 100 answers go on to the limit, and 25 % are wrong."
        in page
    )
    assert "- noise: " not in page


def test_a_perplexity_is_in_a_table_of_its_own(publishing: ModuleType) -> None:
    loss = {"task": "text", "lower_is_better": True, "metric": "perplexity"}
    read = [
        made(score=(20.0, 1.0), **loss),
        made("kvzip", "0.2", (25.0, 1.0), (5.0, 4.0, 6.0), **loss),
    ]
    page = publishing.real_page.page([*measured(), *read], [])

    (below,) = page.split("### Perplexity at a fifth (lower is better), before")[1:]
    assert "| full | 20.0" in below and "| kvzip | 25.0" in below
    assert "KVzip finds **91 %**" in breakable(page)


def test_perplexities_of_several_texts_stand_side_by_side(publishing: ModuleType) -> None:
    loss = {"task": "text", "lower_is_better": True, "metric": "perplexity"}
    read = []
    for name, full, ours in (("novel.txt", 20.0, 25.0), ("code.txt", 5.0, 6.0)):
        apart = ours - full
        for one in (
            made(score=(full, 1.0), **loss),
            made("kvzip", "0.2", (ours, 1.0), (apart, apart - 0.5, apart + 0.5), **loss),
        ):
            cell = one.cell.model_copy(update={"data": (name,)})
            read.append(one.model_copy(update={"cell": cell}))
    only = made("zap", "0.2", (5.5, 1.0), (0.5, 0.0, 1.0), **loss)
    read.append(only.model_copy(update={"cell": read[-1].cell.model_copy(
        update={"method": "zap", "budget": "0.2"})}))  # fmt: skip
    page = publishing.real_page.page([*measured(), *read], [])

    (below,) = page.split("### Perplexity at a fifth (lower is better), before")[1:]
    rows = [line for line in below.splitlines() if line.startswith("| ")][:5]
    assert rows[0].startswith("| method | novel.txt | code.txt | kept |")
    assert rows[2].startswith("| full | 20.0 | 5.0 |")
    assert rows[3].startswith("| kvzip | 25.0, +5.0 (+4.5 to +5.5) | 6.0, +1.0 (+0.5 to +1.5) |")
    assert rows[4].startswith("| zap | – | 5.5, ")


def _methods(line: str) -> frozenset[str]:
    """Methods of a command as records name them, but for the baselines."""
    (text,) = re.findall(r"--methods (.+?) --", line)
    return frozenset(str(parse(name)) for name in listed(text)) - {FULL, *BASELINES}


def test_the_leaderboard_has_every_registered_method_or_a_reason(publishing: ModuleType) -> None:
    planned = {name for unit in publishing.planned() for name, _ in unit.contenders}
    # The first command runs all methods.
    every = listed(publishing.option(publishing.commands("BOOK")[0], "methods"))
    names = {part.split(":")[0] for text in every for part in text.split(" + ")}

    assert planned >= {str(parse(text)) for text in every}
    assert not set(LEFT_OUT) & names
    assert set(kvfold.list_methods()) == names | set(LEFT_OUT) | set(BASELINES) - {"cut"}


def asked(line: str) -> tuple[bool, int]:
    """The protocol and the number of samples of a command."""
    (samples,) = re.findall(r"--samples (\d+)", line)
    return "--question-aware" in line, int(samples)


def test_the_plan_is_what_the_command_runs(
    publishing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the arguments that `kvfold` gets."""
    program, told = tmp_path / "kvfold", tmp_path / "told"
    models = tmp_path / ".models"
    models.mkdir()
    for fitted in ("scorer", "filters", "heads", "curve"):
        (models / f"smollm2-{fitted}.safetensors").touch()
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", RESULTS / "run.sh", "book.txt", tmp_path]
    subprocess.run(command, env=os.environ | {"PATH": path}, cwd=tmp_path, check=True)
    ran = {
        (task, length if tasks()[task].has_lengths else None, *asked(line), _methods(line))
        for line in told.read_text().splitlines()
        for task in re.findall(r"--tasks (\S+)", line)[0].split(",")
        for length in map(int, re.findall(r"--lengths (\d+)", line))
    }

    for part in ("STEPS", "METHODS"):
        monkeypatch.setenv(part, "none")  # a part of the run is not the plan
    planned = publishing.planned()
    baselines = {FULL, *BASELINES}
    assert {
        (*one.unit, one.samples, frozenset(name for name, _ in one.contenders) - baselines)
        for one in planned
    } == ran
    assert len(planned) == len(ran) >= 10


def test_what_is_left_of_the_plan_is_told_as_commands(publishing: ModuleType) -> None:
    left = real_left.left
    command = publishing.commands("BOOK", "OUT")[1]
    done = {
        (one.unit, contender): one.samples
        for one in publishing.of_command(command)
        for contender in one.contenders
    }
    novel = publishing.real_page.Unit(NOVEL, 1024, True)
    lacking = {("kvzip + recent", "0.3"), ("turboquant:keys=8", None), ("cut", "0.2")}

    def records(counts: dict[Any, int]) -> list[CellResult]:
        return [
            made(name, budget, task=unit.task, length=unit.length, aware=unit.aware, samples=count)
            for (unit, (name, budget)), count in counts.items()
        ]

    assert not [*left(command, records(done))]
    assert [publishing.of_command(one) for one in left(command, [])] == [
        [one] for one in publishing.of_command(command)
    ]
    (only,) = left(command, records(done | {(novel, one): 39 for one in lacking}))
    assert publishing.option(only, "methods") == "full,kvzip + recent,turboquant_k8v4"
    assert publishing.option(only, "budgets") == "0.3,0.2"
    (planned,) = publishing.of_command(only)
    assert planned.unit == novel and planned.contenders > lacking
    others = [word for word in command if word not in only]
    assert len(others) == 3  # methods, budgets and tasks


def test_a_run_is_published_while_it_goes_on(
    publishing: ModuleType, run: Path, checkout: Path
) -> None:
    before = (run / "samples.jsonl").read_bytes()

    publishing.publish(run, checkout)

    out = checkout / "docs" / "results"
    assert (run / "samples.jsonl").read_bytes() == before
    scores = {one.cell.method: one.score for one in load_results([out / "records.jsonl"])}
    assert {name: score.value for name, score in scores.items()} == {
        "full": 100.0, "kvzip": 75.0, "h2o": 0.0,
    }  # fmt: skip
    claim = "KVzip finds **75 %**; the best other method, H2O, 0 %; the full cache 100 %"
    for page in (checkout / "README.md", out / "README.md"):
        assert claim in breakable(page.read_text(encoding="utf-8"))
    assert (checkout / "README.md").read_text(encoding="utf-8").endswith("<!-- end -->\n\nmore\n")
    assert "| 4 |" in (out / "README.md").read_text(encoding="utf-8")
    rows = csv.DictReader(
        io.StringIO(gzip.decompress((out / "samples.csv.gz").read_bytes()).decode())
    )
    assert {len(row["prediction"]) for row in rows} == {200}
    found = {path.name for path in out.iterdir()}
    assert {"report.md", "tasks.md", publishing.real_picture.FILE} <= found
    texts = [path.read_text(encoding="utf-8") for path in out.iterdir() if path.suffix != ".gz"]
    assert not [text for text in texts if "/home/someone" in text]


def test_cells_of_several_runs_are_published_beside_each_other(
    publishing: ModuleType, run: Path, checkout: Path, tmp_path: Path
) -> None:
    """More samples replace fewer, fewer do not; what one run lacks stays as the other has it."""
    out, other = checkout / "docs" / "results", tmp_path / "other"
    lines = [
        sample(method, budget, index, not budget)
        for index in range(6)
        for method, budget in (("full", None), ("kvzip", "0.2"))
    ]
    needle = {"task": "ruler_niah_single_1"}
    lines[10:] = [
        line.model_copy(update={"cell": line.cell.model_copy(update=needle)}) for line in lines[10:]
    ]
    other.mkdir()
    samples_file(other).add(lines)

    publishing.publish(run, checkout)
    publishing.publish(other, checkout)
    publishing.publish(run, checkout)

    found = {
        (one.cell.task[-1], one.cell.method): (one.samples, one.score.value)
        for one in load_results([out / "records.jsonl"])
    }
    assert found == {
        ("2", "full"): (5, 100.0), ("2", "kvzip"): (5, 0.0), ("2", "h2o"): (4, 0.0),
        ("1", "full"): (1, 100.0), ("1", "kvzip"): (1, 0.0),
    }  # fmt: skip
    rows = csv.DictReader(
        io.StringIO(gzip.decompress((out / "samples.csv.gz").read_bytes()).decode())
    )
    assert Counter(row["method"] for row in rows) == {"full": 6, "kvzip": 6, "h2o": 4}


def test_samples_that_some_methods_have_not_met_yet_are_left_out(publishing: ModuleType) -> None:
    done = [
        sample(method, budget, index, True)
        for index in range(2)
        for method, budget in (("full", None), ("kvzip", "0.2"), ("tova", "0.2"))
    ]
    begun = [sample("full", None, 2, True), sample("tova", "0.2", 2, True)]
    beside = [sample("kvzip", "0.2", 3, True)]  # the full cache lacks it

    assert publishing.settled([*done, *begun, *beside]) == done
    assert publishing.settled(begun) == begun  # the picture's methods have not begun


def test_a_task_that_is_run_with_fewer_methods_is_whole(publishing: ModuleType) -> None:
    def at(line: SampleResult, length: int) -> SampleResult:
        cell = line.cell.model_copy(update={"length": length})
        return line.model_copy(update={"cell": cell})

    short = [sample(*one, 0, True) for one in (("full", None), ("kvzip", "0.2"), ("h2o", "0.2"))]
    long = [at(sample(*one, 0, True), 7168) for one in (("full", None), ("kvzip", "0.2"))]

    assert publishing.settled([*short, *long]) == [*short, *long]


@pytest.mark.slow
def test_a_run_of_another_model_is_not_published(
    publishing: ModuleType, run: Path, checkout: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    line = sample("full", None, 0, True)
    subject = line.cell.subject.model_copy(update={"weights": "others"})
    cell = line.cell.model_copy(update={"subject": subject})
    samples_file(other).add([line.model_copy(update={"cell": cell})])
    publishing.publish(run, checkout)
    before = (checkout / "docs" / "results" / "records.jsonl").read_bytes()

    with pytest.raises(KvfoldError, match="holds results of"):
        publishing.publish(other, checkout)
    assert (checkout / "docs" / "results" / "records.jsonl").read_bytes() == before


def test_equal_samples_give_equal_files(publishing: ModuleType, run: Path, checkout: Path) -> None:
    def files() -> dict[Path, bytes]:
        publishing.publish(run, checkout)
        return {path: path.read_bytes() for path in checkout.rglob("*.*") if path.parent != run}

    assert files() == files()


def test_the_picture_has_the_bytes_and_scores_of_the_records(publishing: ModuleType) -> None:
    drawn = drawing(publishing, measured())

    for panel, (best, other) in zip(
        drawn.axes, (("KVzip", "SnapKV"), ("SnapKV", "KVzip")), strict=True
    ):
        lines = {line.get_label(): line for line in panel.lines}
        assert set(lines["full cache"].get_ydata()) == {98.0}
        points = {name: lines[name].get_xydata().tolist() for name in (best, other, "DBudgetKV")}
        assert points == {
            best: [[0.2, 91.0]],
            other: [[0.2, 31.0], [0.5, 97.0]],
            "DBudgetKV": [[1.0, 96.0]],
        }


def test_the_picture_is_read_on_a_small_screen_without_colours(publishing: ModuleType) -> None:
    picture = publishing.real_picture
    lines = picture.LINES.values()

    assert picture.LETTERS / 72 / picture.WIDTH * NARROW >= SMALLEST
    assert len({line.marker for line in lines}) == len(lines)
    with_budget = [line for name, line in picture.LINES.items() if name in SEVERAL]
    assert len({line.dash for line in with_budget}) == len(SEVERAL)


def test_pages_are_made_anew_of_published_records(
    publishing: ModuleType, run: Path, checkout: Path
) -> None:
    publishing.publish(run, checkout)
    out = checkout / "docs" / "results"
    before = {path: path.read_bytes() for path in checkout.rglob("*.*") if path.parent != run}
    for name in ("README.md", "report.md", publishing.real_picture.FILE):
        (out / name).write_text("other", encoding="utf-8")

    publishing.make_pages(load_results([out / "records.jsonl"]), checkout)
    assert {path: path.read_bytes() for path in before} == before


def test_samples_of_a_file_fitted_anew_are_not_mixed_with_older_ones(
    publishing: ModuleType,
) -> None:
    def of(files: tuple[str, ...], index: int) -> SampleResult:
        line = sample("zap:file=a", "0.2", index, True)
        return line.model_copy(update={"cell": line.cell.model_copy(update={"files": files})})

    full, old, new = sample("full", None, 0, True), of(("1a",), 0), of(("2b",), 0)

    assert publishing.of_newest_files([full, old, of(("1a",), 1), new]) == [full, new]
