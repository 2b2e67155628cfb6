# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel: what is in them, and that the wheel works where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")

PATH = re.compile(r"`([\w./]+/[\w.]*|[A-Z]+\.md|pyproject\.toml)`")


def run(*command: str, installed: Path | None = None) -> str:
    """What a command prints, run in the folder `installed` and importing from there."""
    alone = {"PYTHONPATH": str(installed)} if installed else {}
    env = os.environ | alone
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=installed, env=env
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it, without network."""
    if not all(map(find_spec, ("build", "hatchling", "pip"))):
        pytest.skip("building without network needs build, hatchling and pip")
    out = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    return out


@pytest.fixture(scope="module")
def sdist(built: Path) -> dict[str, str]:
    """Every file of the sdist by its path in the project, with its text where it is Markdown."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {m.name.partition("/")[2]: m for m in tar.getmembers() if m.isfile()}
        read = {name: tar.extractfile(member) for name, member in files.items()}
        return {
            name: file.read().decode() if file and name.endswith(".md") else ""
            for name, file in read.items()
        }


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare folder with the wheel in it, and nothing that it depends on."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--target", str(target), str(wheel))
    return target


def test_contributing_names_files_that_are_there() -> None:
    pages = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "extending.md")
    named = [name for page in pages for name in PATH.findall(page.read_text(encoding="utf-8"))]
    paths = [ROOT / name for name in named if "NAME" not in name]
    assert len(paths) > 20
    assert not [str(path.relative_to(ROOT)) for path in paths if not path.exists()]


@pytest.mark.whole
def test_links_are_alive_in_the_sdist(sdist: dict[str, str]) -> None:
    pages = [name for name in sdist if name.endswith(".md")]
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/structure.md"} <= set(pages)
    folders = {str(parent) for name in sdist for parent in PurePosixPath(name).parents}
    dead = [
        f"{page}: {link}"
        for page in pages
        for link in LINK.findall(sdist[page])
        if os.path.normpath(PurePosixPath(page).parent / link) not in sdist.keys() | folders
    ]
    assert "docs/basics.md" in LINK.findall(sdist["README.md"])
    assert not dead


@pytest.mark.slow
def test_the_sdist_has_tests_benchmarks_and_examples(sdist: dict[str, str]) -> None:
    wanted = ["CITATION.cff", "LICENSE", "Makefile", "pyproject.toml", "tests/test_package.py"]
    assert set(wanted) <= set(sdist)
    tests = "tests", "tests_lmcache", "tests_pages", "tests_real", "tests_vllm"
    for folder in ("benchmarks", "docs", "examples", "real_model", *tests, "training"):
        there = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".md"}]
        assert {path.relative_to(ROOT).as_posix() for path in there} <= set(sdist)


@pytest.mark.slow
def test_the_wheel_has_all_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = [p for p in (ROOT / "kvfold").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert held == {path.relative_to(ROOT).as_posix() for path in package}
    assert {"kvfold/py.typed", "kvfold/bundled/model.safetensors"} <= held
    assert {"kvfold/report/template/page.html", "kvfold/inspect/template/page.html"} <= held


@pytest.mark.whole
def test_the_installed_wheel_works(installed: Path) -> None:
    program = (
        "import kvfold; print(kvfold.__file__); print('kvzip' in kvfold.list_methods());"
        "print(kvfold.bundled_model()[0].config.model_type)"
    )
    shown = run(sys.executable, "-c", program, installed=installed).splitlines()
    assert shown == [str(installed / "kvfold" / "__init__.py"), "True", "llama"]
    assert "compress" in run(str(installed / "bin" / "kvfold"), "--help", installed=installed)
