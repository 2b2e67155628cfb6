# SPDX-License-Identifier: Apache-2.0
"""What a codec loses: the page's tables follow from the rows."""

from __future__ import annotations

from docs.generate import codec_page as pages
from docs.generate.made import with_part


def test_the_page_is_made_of_the_rows():
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == with_part(text, pages.BEGIN, pages.tables(pages.load()))


def test_texts_are_those_with_all_cells():
    counts = {row.text: 0 for row in pages.load()}
    for row in pages.load():
        counts[row.text] += 1
    assert len(set(counts.values())) == 1 and len(counts) > 1


def test_a_smaller_file_counts_only_within_the_limit():
    """Limits are multiples of the KL of `kivi:bits=4` in memory; by hand."""
    rows = [
        row("kivi:bits=4", None, kl=0.004, part=1 / 4),
        row("full", "kvtc:ratio=8", kl=0.003, part=1 / 8),
        row("full", "kvtc:ratio=16", kl=0.007, part=1 / 16),
        row("full", "zstd", kl=0.0, part=1 / 2),
    ]
    table = pages.tables(rows).split("\n\n")[1].splitlines()
    assert table[0].startswith("| context | codec | KL ≤ 0.0040 | KL ≤ 0.0080 |")
    assert table[2] == "| `full` | `kvtc` | 1/8.0 | 1/16.0 | 1/16.0 | 1/16.0 |"
    assert table[3] == "| `full` | `zstd` | 1/2.0 | 1/2.0 | 1/2.0 | 1/2.0 |"


def row(method, codec, kl, part):
    return pages.Row(
        text="a", tokens=9, method=method, kept=None, codec=codec, kl=kl, agree=1, right=1, asked=1,
        part=part, save_seconds=0, load_seconds=0, decode_seconds=0,
    )  # fmt: skip
