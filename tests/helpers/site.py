# SPDX-License-Identifier: Apache-2.0
"""The documentation site, built where nothing can be looked up or connected to.

`python -m tests.helpers.site FOLDER`, which `make docs` runs.
"""

from __future__ import annotations

import runpy
import socket
import sys
from typing import Any, NoReturn


def refused(*_: Any, **__: Any) -> NoReturn:
    raise OSError("the site is built without network")


if __name__ == "__main__":
    socket.getaddrinfo = socket.socket.connect = refused  # type: ignore[assignment, method-assign]
    sys.argv = ["mkdocs", "build", "--strict", "--site-dir", sys.argv[1]]
    runpy.run_module("mkdocs", run_name="__main__")
