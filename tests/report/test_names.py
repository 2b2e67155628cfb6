# SPDX-License-Identifier: Apache-2.0
"""Methods' names in reports: without files, unless these tell two apart."""

from __future__ import annotations

import pytest

from kvfold.report.board import boards, readable
from kvfold.report.tables import markdown
from tests.helpers.reports import made

ZAP = "zap:file=.models/a.safetensors"


def names(*subjects: tuple[str, tuple[str, ...]]) -> list[str]:
    """Readable names of methods that read files of these digests."""
    results = [made(method, "0.2") for method, _ in subjects]
    results = [
        one.model_copy(update={"cell": one.cell.model_copy(update={"files": files})})
        for one, (_, files) in zip(results, subjects, strict=True)
    ]
    return [one.cell.method for one in readable(results)]


@pytest.mark.parametrize(
    ("subjects", "expected"),
    [
        ([(ZAP, ("1a",)), ("kvzip", ())], ["zap", "kvzip"]),
        ([(ZAP, ()), ("cut", ()), ("no method: at all", ())], ["zap", "cut", "no method: at all"]),
        ([(f"{ZAP},floor=0.25", ("1a",)), (ZAP, ("1a",))], ["zap:floor=0.25", "zap"]),
        ([(f"{ZAP},level=uniform + every", ())], ["zap:level=uniform + every"]),
        ([(ZAP, ("1a",)), (ZAP.replace("a.", "b."), ("2b",))], [ZAP, ZAP.replace("a.", "b.")]),
        ([(ZAP, ("1a",)), (ZAP, ("2b",))], [f"{ZAP} (1a)", f"{ZAP} (2b)"]),
        ([(ZAP, ()), (ZAP, ("2b",))], [ZAP, f"{ZAP} (2b)"]),
        ([("zap", ("1a",)), (ZAP, ("2b",))], ["zap", ZAP]),
        ([("kvzip:normalize=True", ())], ["kvzip:normalize=True"]),
    ],
)
def test_names(subjects: list, expected: list[str]) -> None:
    assert names(*subjects) == expected


def test_tables_show_them() -> None:
    text = markdown(boards([made(), made(ZAP, "0.2")]))

    assert "| zap | 0.2 |" in text and ".models" not in text
