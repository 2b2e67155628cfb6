# SPDX-License-Identifier: Apache-2.0
"""Tasks: what they generate, how they read the benchmarks' rows, and what they say of bad ones."""

import dataclasses
import random
from collections import Counter

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import families, select
from kvfold.eval.tasks.generated import largest_haystack, tokens
from tests.helpers.tasks import ALL, count, made

# Tasks that hide answers in one context; the others have files of their own.
ELSEWHERE = ("graph_walk", "tool_session")
GENERATED = [name for name, task in ALL.items() if task.generated and name not in ELSEWHERE]


def test_every_benchmark_is_there_whole():
    members = Counter(task.benchmark for task in ALL.values())
    assert members["ruler"] == 13
    assert members["longbench"] == 21
    assert members["longbench_e"] == 13
    assert members["infinitebench"] == 12
    assert members["loogle"] == 4
    assert {"gsm8k", "math500", "mt_bench", "longbench_v2", "perplexity", "niah"} <= set(members)


def test_every_task_says_what_it_is():
    for name, task in ALL.items():
        assert task.name == name
        assert task.summary and task.source and task.group
        assert "\n" not in task.summary
        assert bool(task.metric) != (task.by_likelihood or name == "mt_bench")
        assert not task.generated or task.truncation == "none"


def test_tasks_are_chosen_by_name_or_by_benchmark():
    assert len(select(["ruler"])) == 13
    assert [task.name for task in select(["gsm8k", "ruler_vt", "gsm8k"])] == ["gsm8k", "ruler_vt"]
    with pytest.raises(KvfoldError, match=r"unknown task 'rulers'.*longbench"):
        select(["rulers"])


def test_a_task_without_a_metric_refuses_to_score():
    with pytest.raises(KvfoldError, match="no metric"):
        ALL["mt_bench"].score("", None)


@pytest.mark.parametrize("length", [1200, 4500])
@pytest.mark.parametrize("name", GENERATED)
def test_generated_samples_fill_the_length_and_hold_their_answers(name, length):
    for record in made(name, length=length):
        used = tokens(record, count)
        assert record.metadata["tokens"] == used
        # The largest haystack that fits: a unit more would not.
        unit = 140 if "kv" in name or "niah_multikey" in name else 100
        assert length - unit * (3 if name == "ruler_cwe" else 1) <= used <= length
        for question in record.questions:
            assert question.answers
            assert all(answer in record.context for answer in question.answers)
            assert not any(f" {answer} " in question.text for answer in question.answers)
            perfect = ALL[name].score(" ".join(question.answers), question)
            assert (perfect.value, perfect.failed) == (1, None)
            assert ALL[name].score("nothing of it", question).value == 0


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_seed_gives_the_same_samples_and_another_others(name):
    first, second = made(name)
    assert (first.index, second.index) == (0, 1)
    assert first.context != second.context
    assert made(name) == [first, second]
    # A sample does not depend on how many are asked for.
    assert made(name, samples=1) == [first]
    contexts = [[record.context for record in made(name, 4, seed=seed)] for seed in (0, 1)]
    assert contexts[0] != contexts[1]


@pytest.mark.parametrize("name", GENERATED)
def test_a_length_that_cannot_hold_a_sample_is_refused(name):
    with pytest.raises(KvfoldError, match="tokens cannot hold"):
        made(name, length=40)


def test_generated_tasks_need_a_way_to_count():
    with pytest.raises(KvfoldError, match="count="):
        made("ruler_vt", count=None)


def test_the_search_for_a_size_ends_and_finds_the_largest():
    rng = random.Random(0)
    for _ in range(200):
        slope, base, limit = rng.uniform(0.3, 40), rng.randint(0, 300), rng.randint(350, 9000)
        calls = []

        def size(n, slope=slope, base=base, calls=calls):
            calls.append(n)
            return base + int(slope * n)

        best = largest_haystack(size, limit, 1)
        assert size(best) <= limit < size(best + 1)
        assert len(calls) < 40
        assert largest_haystack(size, limit, 1, 7) == min(best, 7)
    with pytest.raises(KvfoldError, match="100 tokens cannot hold a haystack, which takes at"):
        largest_haystack(lambda n: 101, 100, 1, what="a haystack")


def test_records_cannot_be_changed():
    record = made("ruler_niah_single_1", 1)[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.context = ""


def test_a_benchmarks_own_name_for_a_task_is_a_hint():
    with pytest.raises(KvfoldError, match="did you mean 'ruler_niah_multikey_1'"):
        select(["niah_multikey_1"])
    assert [task.name for task in families()["jsonl"]] == ["jsonl"]
    assert sum(map(len, families().values())) == len(ALL)
