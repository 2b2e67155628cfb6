# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes on this machine give the records of one process, though an actor is killed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import kvfold
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import worker_spec
from kvfold.eval.run.plan import EvalPlan, TaskSamples, contenders
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import SampleRequest, select
from kvfold.hf.chat_template import token_count
from kvfold.jobs.executor import WorkerSpec, here, in_parallel
from kvfold.jobs.ray_cluster import RayExecutor, cluster
from tests.helpers.packages import Package

ray = Package("ray", optional=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    own = Package("ray.cluster_utils", optional=True)
    nodes = own.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


def told(samples: list[SampleResult]) -> list[str]:
    """All that does not depend on who ran it, and when."""
    apart = {"at", "setup", "outcome"}
    times = {"prefill_seconds", "answer_seconds"}
    lines = [
        f"{sample.model_dump_json(exclude=apart)} {sample.outcome.model_dump_json(exclude=times)}"
        for sample in samples
    ]
    return sorted(lines)


@pytest.mark.whole
def test_two_nodes_give_the_records_of_one_process_though_an_actor_is_killed(
    address: str,
) -> None:
    model, tokenizer = kvfold.bundled_model()
    request = SampleRequest(samples=12, length=512, count=partial(token_count, tokenizer))
    (task,) = select(["ruler_niah_multikey_1"])
    plan = EvalPlan(
        (TaskSamples.of(task, request),),
        EvaluatedModel.of("bundled", model, tokenizer),
        EvalProtocol(max_length=4096),
        tuple(contenders(["snapkv"], ["0.2", "0.1"])),
    )
    jobs, doing = list(plan.jobs({})), worker_spec("bundled")
    alone = [sample for samples in here(doing, model, tokenizer)(jobs) for sample in samples]

    executor = RayExecutor(doing, address, None)
    started = []

    class Watched:
        count = executor.count
        submit, wait, result = executor.submit, executor.wait, executor.result
        shutdown = executor.shutdown

        def start_worker(self):
            started.append(executor.start_worker())
            return started[-1]

    spread = []
    for done, samples in enumerate(in_parallel(doing, Watched())(jobs)):
        spread += samples
        if done == 2:
            ray.kill(started[0].handle)
    assert len(ray.nodes()) == 2
    assert len(started) == 3, "one was killed, and another took its place"
    assert told(spread) == told(alone)


class Unreadable(str):
    """A text that no actor can read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.whole
def test_a_job_that_raises_is_told_in_its_own_words_and_a_model_s_failure_ends_the_run(
    address: str,
) -> None:
    # Functions inside a function are sent to actors whole: these need not import this file.
    def echo(model: object, tokenizer: object, job: str) -> Iterator[str]:
        if job == "raises":
            raise ValueError("row 2 is malformed")
        yield job

    def gave_up(job: str, why: str) -> str:
        return f"{job} gave up: {why}"

    todo = ["a", "raises", Unreadable("text"), "b"]
    found = sorted(cluster(WorkerSpec("bundled", echo, gave_up), address, 1)(todo))
    assert found[:3] == ["a", "b", "raises gave up: ValueError: row 2 is malformed"]
    assert found[3].startswith("text gave up: ") and len(found) == 4
    for name, why in (("/none", "cannot load '/none'"), (Unreadable("x"), "invalid literal")):
        with pytest.raises(KvfoldError, match=f"no model in a worker: .*{why}"):
            list(cluster(WorkerSpec(name, echo, gave_up), address, 1)(["a", "b"]))


@pytest.mark.slow
def test_where_no_cluster_is_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ConnectionError("nobody there")

    pytest.importorskip("ray")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(KvfoldError, match=r"no Ray cluster at 192\.0\.2\.1:6379: nobody there"):
        cluster(worker_spec("bundled"), "192.0.2.1:6379", None)
