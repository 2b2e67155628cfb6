# SPDX-License-Identifier: Apache-2.0
"""Command line of lm-evaluation-harness with the model `kvfold` registered."""

from __future__ import annotations

import importlib
import sys

from rich.text import Text

from kvfold.errors import KvfoldError
from kvfold.terminal import errors


def main() -> None:
    """Runs `lm-eval`; a KvfoldError becomes one line on standard error and exit code 2."""
    try:
        # The import registers the model, or raises KvfoldError with the install command.
        importlib.import_module("kvfold.eval.lm_eval.model")
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except KvfoldError as refused:
        errors().print(Text(f"error: {refused}", style="red"))
        sys.exit(2)


if __name__ == "__main__":
    main()
