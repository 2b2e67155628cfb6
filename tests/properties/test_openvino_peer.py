# SPDX-License-Identifier: Apache-2.0
"""What is measured of OpenVINO GenAI, with a pipeline that only counts blocks."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import openvino_peer as peer


class Pipeline:
    """Blocks after each step as listed, and one token per step."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks, self.number, self.asked = blocks, 0, list[Any]()

    def add_request(self, *asked: Any) -> Any:
        self.asked.append(asked)
        said = SimpleNamespace(generated_ids=list(range(len(self.blocks))))
        return SimpleNamespace(read_all=lambda: [said])

    def has_non_finished_requests(self) -> bool:
        return self.number < len(self.blocks)

    def step(self) -> None:
        self.number += 1

    def get_metrics(self) -> Any:
        used = self.blocks[self.number - 1]
        return SimpleNamespace(cache_usage=100 * used / peer.POOL)


def test_blocks_and_seconds_of_each_step_are_told() -> None:
    pipeline = Pipeline([29, 29, 7, 7])

    found = peer.steps(pipeline, 5, "ids", "greedy")

    assert pipeline.asked == [(5, "ids", "greedy")]
    assert found["index"] == 5
    assert found["ids"] == [0, 1, 2, 3]
    assert found["blocks"] == [29, 29, 7, 7]
    assert len(found["seconds"]) == 4
    assert all(second >= 0 for second in found["seconds"])


def test_sizes_are_whole_blocks_with_some_to_choose() -> None:
    for setting in peer.SETTINGS[1:]:
        sizes = setting.start, setting.recent, setting.most
        assert all(size % peer.BLOCK == 0 for size in sizes)
        assert setting.start + setting.recent < setting.most


def test_what_the_other_environment_prints_is_read_line_by_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in reads the request, and prints a line for each prompt."""
    other = tmp_path / "other"
    other.write_text(
        "#!/usr/bin/env python3\nimport json, sys\n"
        "gguf, setting, prompts, end = json.load(sys.stdin)\n"
        "for prompt in prompts:\n    print(json.dumps([gguf, setting, prompt, end]))\n"
        "sys.exit(len(prompts) > 2)\n"
    )
    other.chmod(0o755)
    given = argparse.Namespace(python=other, gguf=Path("a.gguf"))

    assert list(peer.peer(given, ["SUM", [1, 2], 9])) == [
        ["a.gguf", "SUM", 1, 9],
        ["a.gguf", "SUM", 2, 9],
    ]
    with pytest.raises(SystemExit, match="SUM: openvino-genai ended with 1"):
        list(peer.peer(given, ["SUM", [1, 2, 3], 9]))
