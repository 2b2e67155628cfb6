# SPDX-License-Identifier: Apache-2.0
"""Texts compressed on arrival: once each, into files as `kvfold compress` writes them."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import kvfold
from kvfold import Budget
from kvfold.bundled import FOLDER
from kvfold.fitted.of_model import read_fitted, write_fitted
from kvfold.jobs.compress import CompressJob, CompressOptions, CompressResult, worker_spec
from kvfold.jobs.executor import here
from kvfold.methods.stages.score.learned import Scorer
from kvfold.serve.errors import ApiError
from kvfold.serve.vllm.arrivals import OWN, Arrivals
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.placeholders import ServedFolder
from tests.helpers.contexts import DOCUMENT, assert_same

OPTIONS = CompressOptions(kvfold.parse("snapkv"), Budget.of(40), None, "at_end", 0)


class Counted:
    """Compresses in this process, and counts."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.texts: list[str] = []
        self.inner = here(worker_spec("none"), model, tokenizer)

    def __call__(self, jobs: Any) -> Any:
        def noted() -> Any:
            for job in jobs:
                self.texts.append(job.text if isinstance(job, CompressJob) else job.source.stem)
                yield job

        return self.inner(noted())


@pytest.fixture
def run(model: Any, tokenizer: Any) -> Counted:
    return Counted(model, tokenizer)


def test_a_text_is_compressed_once_and_as_by_the_command(run, model, tokenizer, tmp_path) -> None:
    arrivals = Arrivals(tmp_path, OPTIONS, run, "")

    async def several() -> list[str]:
        return await asyncio.gather(*(arrivals.made(DOCUMENT) for _ in range(5)))

    names = set(asyncio.run(several())) | {asyncio.run(arrivals.made(DOCUMENT))}
    assert len(names) == 1 and run.texts == [DOCUMENT]
    (name,) = names
    served = ServedFolder(tmp_path).get(name)
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(tmp_path / "a.kvfold")
    assert served.salt == ServedFolder(tmp_path).get("a").salt
    assert name.startswith(OWN) and served.kept == 40


def test_ids_tell_texts_models_methods_budgets_and_levels_apart(run, tmp_path) -> None:
    one = Arrivals(tmp_path, OPTIONS, run, "")
    two = Arrivals(tmp_path, replace(OPTIONS, budget=Budget.of(41)), run, "")
    three = Arrivals(tmp_path, replace(OPTIONS, level="votes"), run, "")
    ids = {one.id_of("a"), one.id_of("b"), two.id_of("a"), three.id_of("a")}
    ids.add(Arrivals(tmp_path, OPTIONS, run, "another model").id_of("a"))
    assert len(ids) == 5 and one.id_of("a") == Arrivals(tmp_path, OPTIONS, run, "").id_of("a")


def test_ids_tell_fits_apart(run, tmp_path) -> None:
    """A scorer that was fitted anew in place of another would score otherwise."""
    fit = tmp_path / "z.safetensors"
    shutil.copy(FOLDER / "scorer.safetensors", fit)
    options = replace(OPTIONS, method=kvfold.parse(f"zap:file={fit}"))
    before = Arrivals(tmp_path, options, run, "").id_of("a")
    assert Arrivals(tmp_path, options, run, "").id_of("a") == before
    model, _ = kvfold.bundled_model()
    found = read_fitted(fit, model, Scorer)
    anew = replace(found, weights=-found.weights)
    write_fitted(fit, anew, model, written_by="", target="kvzip", texts=0)
    assert Arrivals(tmp_path, options, run, "").id_of("a") != before


@pytest.mark.slow
def test_a_name_that_is_taken_and_a_text_that_cannot_be_are_told(run, tmp_path) -> None:
    arrivals = Arrivals(tmp_path, OPTIONS, run, "")
    assert asyncio.run(arrivals.made(DOCUMENT, "mine")) == "mine"
    with pytest.raises(ApiError, match="there is a context 'mine' already") as taken:
        asyncio.run(arrivals.made(DOCUMENT, "mine"))
    assert taken.value.status_code == 409
    with pytest.raises(ApiError) as long:
        asyncio.run(arrivals.made(DOCUMENT * 500))
    assert long.value.status_code == 400 and "tokens" in str(long.value.detail)
    assert asyncio.run(arrivals.made(DOCUMENT)).startswith(OWN)


def test_an_id_of_an_unnamed_text_cannot_be_given_to_another(run, tmp_path) -> None:
    """Whoever knows a text could else plant a context for all who send it."""
    arrivals = Arrivals(tmp_path, OPTIONS, run, "")
    for name in (arrivals.id_of(DOCUMENT), f"{OWN}report"):
        with pytest.raises(ApiError, match="ids that begin with 'auto-'") as refused:
            asyncio.run(arrivals.made("the sky is blue " * 12, name))
        assert refused.value.status_code == 400 and refused.value.param == "id"
    asyncio.run(arrivals.made(DOCUMENT))
    assert run.texts == [DOCUMENT]


class Held:
    """Writes the texts of jobs as their files, once `go` is set."""

    def __init__(self) -> None:
        self.go, self.texts = Event(), list[str]()

    def __call__(self, jobs: Any) -> Any:
        for job in jobs:
            assert self.go.wait(20)
            self.texts.append(job.text)
            job.path.write_text(job.text)
            yield CompressResult(job.path, None)

    async def release(self) -> None:
        self.go.set()


def test_two_texts_at_once_under_one_id_are_one_and_a_refusal(tmp_path: Path) -> None:
    held = Held()
    arrivals = Arrivals(tmp_path, OPTIONS, held, "")

    async def at_once() -> list[Any]:
        asked = [arrivals.made(text, "mine") for text in ("one", "two", "one")]
        return await asyncio.gather(*asked, held.release(), return_exceptions=True)

    first, second, again, _ = asyncio.run(at_once())
    assert first == again == "mine"  # the same text is made once
    assert isinstance(second, ApiError) and second.status_code == 409
    assert second.code == "context_exists" and "'mine' already" in second.detail
    assert held.texts == ["one"] and (tmp_path / "mine.kvfold").read_text() == "one"
    with pytest.raises(ApiError, match="'mine' already") as taken:
        asyncio.run(arrivals.made("one", "mine"))
    assert taken.value.status_code == 409


@pytest.mark.slow
def test_copies_of_a_file_are_read_again_into_one(model, tokenizer, tmp_path) -> None:
    copies = [tmp_path / "a.kvfold", tmp_path / "b.kvfold"]
    kvfold.compress(model, tokenizer, DOCUMENT, "adakv", 40).save(copies[0])
    copies[1].write_bytes(copies[0].read_bytes())
    inner, go = here(worker_spec("none"), model, tokenizer), Event()
    arrivals = Arrivals(
        tmp_path, OPTIONS, lambda jobs: inner(job for job in jobs if go.wait(20)), ""
    )

    async def released() -> None:
        go.set()

    async def at_once() -> list[Any]:
        return await asyncio.gather(arrivals.reread("a"), arrivals.reread("b"), released())

    one, other, _ = asyncio.run(at_once())
    assert one == other and len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_a_file_is_read_again_once_for_each_version_of_it(run, model, tokenizer, tmp_path) -> None:
    arrivals, path = Arrivals(tmp_path, OPTIONS, run, ""), tmp_path / "a.kvfold"
    names = []
    for method in ("adakv", "kvzip"):
        kvfold.compress(model, tokenizer, DOCUMENT, method, 40).save(path)
        names += [asyncio.run(arrivals.reread("a")) for _ in range(2)]
    assert names[0] == names[1] != names[2] == names[3] and run.texts == ["a", "a"]
    level = ServedFolder(tmp_path).get(names[0]).level
    assert level is not None and level.rule == "mass" and level.kl > 0


@pytest.mark.slow
def test_a_file_is_read_again_into_pages(run, model, tokenizer, tmp_path) -> None:
    """Also one with pages of another size; a file for each size, and the same for the same."""
    uneven = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip + pages:size=10", 60)
    uneven.save(tmp_path / "a.kvfold")
    names = []
    for size in (16, 20):
        arrivals = Arrivals(tmp_path, OPTIONS, run, "", size)
        names += [asyncio.run(arrivals.reread("a")) for _ in range(2)]
        served = ServedFolder(tmp_path, Paged(size)).get(names[-1])
        made = kvfold.load(tmp_path / f"{names[-1]}.kvfold", model, tokenizer)
        expected = kvfold.compress(model, tokenizer, DOCUMENT, f"kvzip + pages:size={size}", 60)
        assert_same(made.cache, expected.cache)
        assert served.pages is not None and served.level is None
    assert names[0] == names[1] != names[2] == names[3] and run.texts == ["a", "a"]


def test_a_file_that_takes_no_pages_is_told(run, model, tokenizer, tmp_path) -> None:
    kvfold.compress(model, tokenizer, DOCUMENT, "d2o", 40).save(tmp_path / "a.kvfold")
    with pytest.raises(ApiError, match="pages are made of many entries at once") as told:
        asyncio.run(Arrivals(tmp_path, OPTIONS, run, "", 16).reread("a"))
    assert told.value.status_code == 400 and told.value.param == "context_id"


def test_a_process_that_ends_ends_those_that_wait_and_is_started_again(tmp_path) -> None:
    def breaks(jobs: Any) -> Any:
        job = next(iter(jobs))
        if job.text == "large":
            raise RuntimeError("no memory")
        job.path.write_text("x")
        yield CompressResult(job.path, None)

    arrivals = Arrivals(tmp_path, OPTIONS, breaks, "")
    for _ in range(2):
        with pytest.raises(ApiError, match="no memory"):
            asyncio.run(arrivals.made("large"))
        assert asyncio.run(arrivals.made("small")).startswith(OWN)


def test_the_oldest_files_of_unnamed_texts_are_removed(tmp_path: Path) -> None:
    def written(jobs: Any) -> Any:
        for job in jobs:
            job.path.write_text("x")
            yield CompressResult(job.path, None)

    arrivals = Arrivals(tmp_path, OPTIONS, written, "", most=2)
    # Users' own, whatever they are called.
    own = [f"{OWN}report", f"{OWN}{'0' * 31}", f"{OWN}{'0' * 33}", f"{OWN}{'g' * 32}"]
    for name in own:
        (tmp_path / f"{name}.kvfold").write_text("x")
    names = [asyncio.run(arrivals.made(text, None)) for text in "abcd"]
    asyncio.run(arrivals.made("e", "named"))
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == {*names[2:], *own, "named"}


def test_a_file_that_another_server_removes_fails_no_request(tmp_path: Path, monkeypatch) -> None:
    def written(jobs: Any) -> Any:
        for job in jobs:
            job.path.write_text("x")
            yield CompressResult(job.path, None)

    arrivals = Arrivals(tmp_path, OPTIONS, written, "", most=2)
    monkeypatch.setattr(arrivals, "_own", lambda: [*tmp_path.glob("*"), tmp_path / "gone.kvfold"])
    for text in "abc":
        asyncio.run(arrivals.made(text))
