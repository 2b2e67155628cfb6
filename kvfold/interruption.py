# SPDX-License-Identifier: Apache-2.0
"""Ends of long work between forwards: it calls `check_interrupted`, which may raise.

Layers and heads that are compressed, and steps of their fits, take seconds each in long texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    check: Callable[[], None] | None = None


_of_thread = _OfThread()


def interrupt_by(check: Callable[[], None] | None) -> None:
    """Long work of this thread calls `check` from now on, which ends it by raising."""
    _of_thread.check = check


def check_interrupted() -> None:
    """Raises what the thread's check raises; without one, nothing."""
    if _of_thread.check is not None:
        _of_thread.check()
