# SPDX-License-Identifier: Apache-2.0
"""`ColdBytes`, apart from torch, so that statistics are printed without it."""

from __future__ import annotations

from typing import NamedTuple


class ColdBytes(NamedTuple):
    """Bytes of cold entries: in host memory, in context files, and read by queries so far."""

    host: int = 0
    filed: int = 0
    read: int = 0
