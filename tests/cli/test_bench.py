# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: options without a meaning for a measurement are refused, not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import refused


@pytest.mark.parametrize(
    "given",
    [
        ("--budgets", "0.2"),
        ("--lengths", "4096"),
        ("--batches", "2"),
        ("--new-tokens", "8"),
        ("--peer", "kvpress"),
        ("--peer-python", "python"),
        ("--compile",),
    ],
    ids=" ".join,
)
def test_throughput_takes_no_options_of_the_rounds(given: tuple[str, ...]) -> None:
    said = refused("bench", "no-such-model", "--throughput", "64+64", *given)
    assert "--throughput" in said and said.endswith(f": leave out {given[0]}")


@pytest.mark.slow
def test_records_are_not_named_as_their_picture() -> None:
    assert "where the picture goes" in refused("bench", "no-such-model", "--out", "b.png")


def test_a_picture_without_records_is_somebody_else_s(tmp_path: Path) -> None:
    picture = tmp_path / "b.png"
    picture.write_bytes(b"a photograph")
    said = refused("bench", "no-such-model", "--out", str(tmp_path / "b.jsonl"))
    assert f"{picture} is there, without records" in said
    assert picture.read_bytes() == b"a photograph"
    assert not (tmp_path / "b.jsonl").exists()


def test_several_are_named_together() -> None:
    said = refused("bench", "m", "--throughput", "8+8", "--peer", "kvpress", "--lengths", "64")
    assert said.endswith(": leave out --lengths, --peer")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--memory-cap", "1GiB"), "without --throughput"),
        (("--peer-python", "python"), "without --peer kvpress"),
        (
            ("--peer-python", "python", "--peer", "transformers-quantized"),
            "without --peer kvpress",
        ),
    ],
)
def test_rounds_take_no_options_of_the_throughput(given: tuple[str, ...], reason: str) -> None:
    said = refused("bench", "no-such-model", *given)
    assert reason in said and said.endswith(f": leave out {given[0]}")
