# SPDX-License-Identifier: Apache-2.0
"""Versions of transformers: the range that kvfold supports, and where a feature begins to work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version

from kvfold.errors import KvfoldError, UnsupportedModel

INSTALLED = Version(transformers.__version__)

# The minor versions that are tested, both ends included, as in pyproject.toml.
OLDEST, NEWEST = (5, 15), (5, 24)

# What a forward calls its cache, first in the version that is installed: 5.24 renamed it.
CACHE_NAMES = ("cache", "past_key_values")
if Version("5.24.0") > INSTALLED:
    CACHE_NAMES = ("past_key_values", "cache")
CACHE = CACHE_NAMES[0]

# The first version measured to give assisted decoding the greedy tokens from a filled cache.
ASSISTED_FROM = Version("5.23.0")

# The first version measured to tell a cache that `generate` was handed it, before dropping it.
TELLS_CACHE_FROM = Version("5.23.0")

# The first version measured to share a model out so that each rank's weights know their place.
PARALLEL_FROM = Version("5.23.0")


def given_cache(options: Mapping[str, Any]) -> Any:
    """The cache among a forward's or `generate`'s arguments, under either name; None without."""
    given = options.get(CACHE)
    return options.get(CACHE_NAMES[1]) if given is None else given


def check_version() -> None:
    """Raises UnsupportedModel for a transformers outside the range that is tested."""
    if not OLDEST <= INSTALLED.release[:2] <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise UnsupportedModel(
            f"this is transformers {INSTALLED}, kvfold works with {oldest} to {newest}: "
            f"pip install 'transformers~={newest}.0'"
        )


def check_assisted() -> None:
    """Raises KvfoldError for transformers whose assisted decoding is wrong from a filled cache."""
    if INSTALLED < ASSISTED_FROM:
        raise KvfoldError(
            f"assisted decoding from a filled cache needs transformers {ASSISTED_FROM} or newer, "
            f"this is {INSTALLED}: update it, or generate without an assistant"
        )


def parallel_options() -> dict[str, Any]:
    """Options of `from_pretrained` that share a model among the processes of torchrun.

    Empty in a single process. Raises KvfoldError if a package is missing or too old.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return {}
    if INSTALLED < PARALLEL_FROM:
        raise KvfoldError(
            f"several ranks need transformers {PARALLEL_FROM} or newer, this is "
            f"{INSTALLED}: update it, or use one process"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise KvfoldError("several ranks need accelerate: pip install 'kvfold[parallel]'")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}
