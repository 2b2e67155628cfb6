# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve --engine vllm` in a process of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

KEY = "secret"
START = """
import sys
from pathlib import Path
from kvfold.cli.serve_vllm import serve
if __name__ == "__main__":
    serve("bundled", host="127.0.0.1", port=int(sys.argv[1]), api_key=sys.argv[2],
          folder=Path(sys.argv[3]), body=2**20, arguments="--max-model-len 1024 --max-num-seqs 8",
          method="kvzip", budget="0.3")
"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`kvfold serve --engine vllm` over the contexts of a folder, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, str(port), KEY, str(folder)]
    process = subprocess.Popen(command)
    try:
        while True:
            assert process.poll() is None, "it has ended"
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
