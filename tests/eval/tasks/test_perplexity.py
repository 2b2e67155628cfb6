# SPDX-License-Identifier: Apache-2.0
"""Windows of a book, and what is asked about their second halves."""

import pytest

from kvfold.errors import KvfoldError
from tests.helpers.tasks import count, made


def test_windows_of_a_book_follow_each_other(tmp_path):
    book = " ".join(f"word{n}" for n in range(2000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    records = made("perplexity", 3, length=400, data=str(tmp_path / "book.txt"))
    assert book.startswith("".join(record.context for record in records))
    assert all(record.metadata["tokens"] == 400 for record in records)
    assert all(record.questions == () for record in records)
    every = made("perplexity", None, length=400, data=str(tmp_path / "book.txt"))
    assert len(every) == count(book) // 400
    with pytest.raises(KvfoldError, match="needs data"):
        made("perplexity")


def test_the_second_half_of_a_window_is_asked_about(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = {"data": str(book), "length": 128, "samples": 2}
    whole = made("perplexity", **options)
    halves = made("continuation", **options)
    assert [r.context for r in whole] == [r.prompt(r.questions[0]) for r in halves]
    for record in halves:
        assert 0 < count(record.context) <= 64 < count(record.prompt(record.questions[0])) <= 128
