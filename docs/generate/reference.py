# SPDX-License-Identifier: Apache-2.0
"""Pages of the reference: public names by group, and the stages by module, for mkdocstrings."""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages

import kvfold
from docs.generate import method_pages
from kvfold import store
from kvfold.methods import stages

# Public names by page
GROUPS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ENCODINGS = ("quantized", "pruned", "paired", "encoding")


def pages() -> dict[str, str]:
    """Pages by their titles."""
    own = {cls.__name__ for cls in method_pages.classes().values()}
    left = set(vars(kvfold)["__all__"]) - own - set(chain(*GROUPS.values()))
    if left:
        raise ValueError(f"public names without a group in {__file__}: {', '.join(sorted(left))}")
    made = {title: _page(title, [f"kvfold.{n}" for n in names]) for title, names in GROUPS.items()}
    modules = [m.name for m in walk_packages(stages.__path__, f"{stages.__name__}.") if not m.ispkg]
    made["Stages"] = _page("Stages", modules)
    made["Encodings"] = _page("Encodings", [f"{store.__name__}.{name}" for name in ENCODINGS])
    return made


def _page(title: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)]) + "\n"
