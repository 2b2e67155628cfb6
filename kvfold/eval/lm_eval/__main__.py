# SPDX-License-Identifier: Apache-2.0
"""The harness's own command line, to which the model `kvfold` is known."""

from __future__ import annotations

import importlib
import sys

from rich.text import Text

from kvfold.errors import KvfoldError
from kvfold.terminal import errors


def main() -> None:
    """Runs `lm-eval`; what kvfold refuses ends it with one line and exit code 2."""
    try:
        # Registers the model, or says what to install.
        importlib.import_module("kvfold.eval.lm_eval.model")
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except KvfoldError as refused:
        errors().print(Text(f"error: {refused}", style="red"))
        sys.exit(2)


if __name__ == "__main__":
    main()
