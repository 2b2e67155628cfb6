# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

DATA = "data: "
# Characters that end a line for some clients, as for `str.splitlines`.
BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def event(content: dict[str, Any]) -> str:
    """An event whose JSON is one line, for every client's notion of a line end."""
    return f"{DATA}{json.dumps(content, ensure_ascii=False).translate(BREAKS)}\n\n"
