# SPDX-License-Identifier: Apache-2.0
"""Tasks of installed packages, by entry points that are made up here."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvfold.eval import tasks as registry
from kvfold.eval.tasks import SampleRequest, select, tasks

MODULE = """
from kvfold.eval.metrics import MetricScore
from kvfold.eval.tasks import Question, Task, TaskSample


def samples(request):
    for index in range(request.samples or 2):
        yield TaskSample("twice", index, f"x = {index}", (Question(" 2x?", (str(2 * index),), 4),))


def score(prediction, question):
    return MetricScore(float(question.answers[0] in prediction))


TASKS = (
    Task("twice", "doubles", "here", "own_sums", "sums", samples, {"score": score}, generated=True),
)
"""


@pytest.fixture
def plugins(monkeypatch, tmp_path):
    """Installs entry points, as `{name: value}`, of a module `own_sums` with a task."""
    (tmp_path / "own_sums.py").write_text(MODULE)
    (tmp_path / "own_niah.py").write_text(MODULE.replace('"twice"', '"niah_magic"'))
    (tmp_path / "joined.py").write_text(MODULE.replace('"own_sums"', '"niah"'))

    def install(values: dict[str, str]) -> None:
        found = EntryPoints(EntryPoint(n, v, registry.PLUGINS) for n, v in values.items())
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: found)
        monkeypatch.syspath_prepend(str(tmp_path))
        registry._installed.cache_clear()

    yield install
    registry._installed.cache_clear()
    for name in ("own_sums", "own_niah", "joined"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("value", ["own_sums", "own_sums:TASKS"])
def test_a_plugins_tasks_are_known_by_name_and_benchmark(plugins, value):
    plugins({"sums": value})
    assert list(tasks())[-1] == "twice" and tasks()["niah_magic"]
    (task,) = select(["own_sums"])
    (sample,) = task.samples(SampleRequest(samples=1))
    assert select(["twice"]) == [task]
    assert task.score("0", sample.questions[0]).value == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module", "ModuleNotFoundError"),
        ("own_sums:score", "names neither tasks nor a module"),
        ("own_niah", "'niah_magic' of a task or benchmark is taken"),
        ("joined", "'niah' of a task or benchmark is taken"),
    ],
)
def test_a_plugin_that_fails_is_left_out_with_a_warning(plugins, value, reason):
    plugins({"gone": value, "sums": "own_sums"})
    with pytest.warns(UserWarning, match=rf"plugin 'gone' \({value} of .*{reason}"):
        known = tasks()
    assert "twice" in known and known["niah_magic"].benchmark == "niah"
