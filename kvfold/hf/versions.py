# SPDX-License-Identifier: Apache-2.0
"""First versions of transformers in which a feature works, as measured."""

from __future__ import annotations

import transformers
from packaging.version import Version

from kvfold.errors import KvfoldError

# The first version measured to give assisted decoding the greedy tokens from a filled cache.
ASSISTED_FROM = Version("5.23.0")

# The first version measured to tell a cache that `generate` was handed it, before dropping it.
TELLS_CACHE_FROM = Version("5.23.0")

# The first version measured to share a model out so that each rank's weights know their place.
PARALLEL_FROM = Version("5.23.0")


def check_assisted() -> None:
    """Raises KvfoldError for transformers whose assisted decoding is wrong from a filled cache."""
    if Version(transformers.__version__) < ASSISTED_FROM:
        raise KvfoldError(
            f"assisted decoding from a filled cache needs transformers {ASSISTED_FROM} or newer, "
            f"this is {transformers.__version__}: update it, or generate without an assistant"
        )
