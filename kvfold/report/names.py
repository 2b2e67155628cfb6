# SPDX-License-Identifier: Apache-2.0
"""Names of methods in reports: without the paths of fitted files where that tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.methods.description import without_files


def readable(results: Sequence[CellResult]) -> list[CellResult]:
    """The results, their methods by the shortest names that tell methods and files apart.

    `zap:file=a.safetensors` is `zap` beside no other zap, and gets its file's digest beside
    results of another file of that name.
    """
    subjects = dict.fromkeys((result.cell.method, result.cell.files) for result in results)
    short = Counter(without_files(method) for method, _ in subjects)
    texts = Counter(method for method, _ in subjects)

    def name(cell: EvalCell) -> str:
        if short[without_files(cell.method)] == 1:
            return without_files(cell.method)
        known = texts[cell.method] == 1 or not cell.files
        return cell.method if known else f"{cell.method} ({', '.join(cell.files)})"

    named = [result.cell.model_copy(update={"method": name(result.cell)}) for result in results]
    return [
        result.model_copy(update={"cell": cell})
        for result, cell in zip(results, named, strict=True)
    ]
