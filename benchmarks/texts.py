# SPDX-License-Identifier: Apache-2.0
"""Texts in many languages to hide needles in: de.txt, fr.txt … of Debian's installation guide.

`python benchmarks/texts.py FOLDER` on Debian or Ubuntu: `apt-get download` fetches the package
(18 MB, nothing is installed). The guide is under the GNU GPL, version 2, which its texts keep.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

from kvfold.eval.tasks.languages import LANGUAGES

PACKAGE = "installation-guide-amd64"
LICENCE = "GNU GPL, version 2"
# The guide's names of languages, where they differ from those of the tasks.
FOLDERS = {"zh": "zh_CN"}
# Characters of a paragraph; shorter ones are labels.
SHORTEST = 40


class Paragraphs(HTMLParser):
    """The paragraphs of a page, each on one line; listings between them are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._open = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and self._open is not None:
            self.found.append(" ".join("".join(self._open).split()))
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open.append(data)


def paragraphs(pages: Iterable[Path]) -> list[str]:
    """Different paragraphs of pages in order, without short ones."""
    found = dict[str, None]()
    for page in pages:
        parser = Paragraphs()
        parser.feed(page.read_text("utf-8"))
        found |= dict.fromkeys(parser.found)
    return [one for one in found if len(one) >= SHORTEST]


def unpacked(folder: Path) -> Path:
    """The guide's folder of languages, downloaded and unpacked into `folder`."""
    # Without a sandbox of its own, apt can write here as root.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", PACKAGE]
    subprocess.run(command, cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True)
    return folder / "usr/share/doc" / PACKAGE


def write(guide: Path, out: Path) -> dict[str, int]:
    """Writes a text for each language of the tasks, and returns their bytes.

    Paragraphs that are also in the English guide are not translated, and left out.
    """
    english = set(paragraphs(sorted((guide / "en").glob("*.html"))))
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for code in LANGUAGES:
        pages = sorted((guide / FOLDERS.get(code, code)).glob("*.html"))
        own = [one for one in paragraphs(pages) if one not in english]
        file = out / f"{code}.txt"
        file.write_text("\n".join(own) + "\n", encoding="utf-8")
        written[code] = file.stat().st_size
    (out / "SOURCE.md").write_text(f"Debian package {PACKAGE}, {LICENCE}.\n", encoding="utf-8")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    out = parser.parse_args().folder.absolute()
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise SystemExit(f"there is no {missing[0]} here: run this on Debian or Ubuntu")
    with TemporaryDirectory() as temporary:
        written = write(unpacked(Path(temporary)), out)
    for code, size in written.items():
        print(f"{out / code}.txt: {size} bytes, {LICENCE}")


if __name__ == "__main__":
    main()
