# SPDX-License-Identifier: Apache-2.0
"""OpenVINO beside kvfold: the page's table follows from the rows, and is that by hand."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.openvino_peer import SETTINGS, Row, Setting
from docs.generate import openvino_page as pages
from docs.generate.made import with_part


def test_the_page_is_made_of_the_rows() -> None:
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == with_part(text, pages.BEGIN, pages.part(pages.load()))


def test_each_sample_is_asked_once_in_each_setting() -> None:
    asked = [(str(row.setting), row.index) for row in pages.load()]
    assert len(set(asked)) == len(asked)
    assert {name for name, _ in asked} <= {str(asdict(one)) for one in SETTINGS}


def test_a_line_is_of_all_rows_of_its_setting() -> None:
    setting = asdict(Setting("SUM", window=0))
    rows = [
        Row(setting, 0, 926, [29, 29, 7, 8], " 12.", 1.0, 7.0, 0.08),
        Row(setting, 1, 926, [29, 29, 7, 7], " 1.", 0.0, 9.0, 0.1),
        Row(setting, 2, 926, [20, 20, 5, 5], " 2.", 0.0, 12.0, 0.2),
    ]

    (line,) = pages.of_openvino(rows)

    kept = f"{(7 / 29 + 7 / 29 + 5 / 20) / 3:.2f}"
    words = "`SUM`, 192 tokens, scored by all queries"
    assert line == ["OpenVINO", words, kept, "33.3", "3"]
