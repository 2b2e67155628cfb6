# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM that kvfold was tested with; its connector API changes between releases."""

from __future__ import annotations

from importlib.metadata import packages_distributions, version

from packaging.version import Version

from kvfold.errors import KvfoldError

# The extra `vllm` in pyproject.toml names the same range.
OLDEST, BELOW = Version("0.30"), Version("0.33")


def check_version(found: str) -> None:
    """Raises KvfoldError for a version of vLLM outside the tested range; builds do not matter."""
    if not OLDEST <= Version(Version(found).base_version) < BELOW:
        raise KvfoldError(
            f"vLLM {found} is outside the range that kvfold was tested with: take "
            f"'vllm>={OLDEST},<{BELOW}'"
        )


def check_installed() -> None:
    """Raises KvfoldError as `check_version`, without importing vLLM, under whatever name it has."""
    for name in packages_distributions().get("vllm", ()):
        check_version(version(name))
