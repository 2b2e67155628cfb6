# SPDX-License-Identifier: Apache-2.0
"""Links between files of the repository, as links between pages of the site."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

from docs.generate.made import ROOT

REPOSITORY = "https://github.com/kvfold/kvfold"
# Pages of the site that are files outside docs/
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# A link or an image in Markdown, by a path inside the repository
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)")


def for_site(text: str, file: str, page: str) -> str:
    """Markdown of a repository file, with links rewritten for `page` of the site.

    Links to files outside the site lead to the repository.
    """

    def changed(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(file).parent / link[2])
        return link[1] + _on_site(target, page)

    return LINK.sub(changed, text)


def source(path: str) -> str:
    """Address of a file or folder of the repository."""
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path}"


def _on_site(target: str, page: str) -> str:
    own = OUTSIDE.get(target)
    if own is None and target.startswith("docs/"):
        own = target.removeprefix("docs/")
        own = f"{own}/README.md" if (ROOT / target / "README.md").is_file() else own
    if own is None and (ROOT / target).exists():
        return source(target)
    return os.path.relpath(own or target, PurePosixPath(page).parent)
