# SPDX-License-Identifier: Apache-2.0
"""Cells of methods that read files: another content is another cell."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path

import pytest

from kvfold.bundled import FOLDER
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.plan import EvalPlan, contenders
from kvfold.eval.run.read_files import digests
from tests.helpers.evaluation import Setting, command, finish, record, wanted
from tests.helpers.registry import registry_restored

EVEN, UNEVEN = [0.5, 0.5, 0.5], [0.2, 0.3, 0.9]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Parts of three layers, as a user writes them."""
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(EVEN))
    return path


def planned(setting: Setting, parts: Path) -> EvalPlan:
    """One sample for knorm, and for knorm with the sizes that the file says."""
    both = ["knorm", f"knorm + sizes:file={parts}"]
    return setting.plan(contenders(both, ["0.5"]), wanted([record()]))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("zap", ["scorer"]),
        ("zap_threshold", ["scorer"]),
        ("qfilter", ["filters"]),
        ("duo", ["heads"]),
        ("snapkv + curve", ["curve"]),
        ("kvzip", []),
        ("cut", []),
    ],
)
def test_files_of_the_bundled_model(method: str, read: list[str]) -> None:
    assert digests(method) == tuple(sha256(FOLDER / f"{name}.safetensors") for name in read)


def test_another_file_is_another_cell(setting: Setting, parts: Path, tmp_path: Path) -> None:
    """Samples of the old file stay, and only the method that reads it runs again."""
    finish(setting, planned(setting, parts), tmp_path / "out")
    parts.write_text(json.dumps(UNEVEN))
    lines = finish(setting, planned(setting, parts), tmp_path / "out")

    sized = [line for line in lines if "sizes" in line.cell.method]
    assert [line.cell.files == (sha256(parts),) for line in sized] == [False, True]
    assert len({line.cell.files for line in sized}) == len(sized) == 2
    assert sized[0].outcome.held.kept_per_layer != sized[1].outcome.held.kept_per_layer
    assert len(lines) == len({line.cell for line in lines}) == 7  # baselines, knorm, and twice this
    assert not sized[0].cell.reference.files


@pytest.mark.slow
def test_a_file_that_changes_during_the_run_fails_its_method_alone(
    setting: Setting, parts: Path
) -> None:
    jobs = list(planned(setting, parts).jobs({}))
    parts.write_text(json.dumps(UNEVEN))
    lines = [line for job in jobs for line in setting.lines(job)]

    wrong = [line for line in lines if line.error]
    assert len(lines) == 6 and len(wrong) == 1
    assert "sizes" in wrong[0].cell.method and "has changed" in wrong[0].error


def test_a_missing_file_is_named_before_anything_runs(parts: Path) -> None:
    parts.unlink()
    method = f"snapkv + sizes:file={parts}"
    with pytest.raises(KvfoldError, match=r"cannot read .*parts\.json: No such file"):
        digests(method)
    said = command("--tasks", "niah", "--methods", method, "--model", "nowhere")
    assert said.exit_code == 2 and "No such file" in said.output


def test_cells_from_before_files_were_noted(setting: Setting, parts: Path) -> None:
    """They load, and are not those of today's file."""
    cell = next(cell for cell in planned(setting, parts).cells() if cell.files)
    old = EvalCell.model_validate_json(cell.model_dump_json(exclude={"files"}))
    plain = setting.cell("kv_retrieval", "knorm", "0.5")

    assert old.files == () and old != cell
    assert EvalCell.model_validate_json(plain.model_dump_json(exclude={"files"})) == plain


def test_code_of_your_own_is_a_file_of_its_method() -> None:
    with registry_restored("tests.helpers.keep_middle"):
        module = import_module("tests.helpers.keep_middle")
        own = (sha256(Path(module.__file__ or "")),)
        assert digests("keep_middle") == digests("keep_middle + adakv") == own
    assert digests("snapkv + adakv") == ()
