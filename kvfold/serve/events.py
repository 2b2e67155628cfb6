# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

DATA = "data: "
# What some clients take for the end of a line, as Python does for that of a text.
BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def event(content: dict[str, Any]) -> str:
    """An event with JSON in one line, whichever characters a client ends lines at."""
    return f"{DATA}{json.dumps(content, ensure_ascii=False).translate(BREAKS)}\n\n"
