# SPDX-License-Identifier: Apache-2.0
"""Maps of length and depth on the page, whose script node runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

# Elements as lists of their children; `count` and `fixed` are of other scripts.
AROUND = """
const make = (name, attributes, ...children) => ({ children: children.flat() });
const [count, fixed] = [String, String];
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_lengths_stand_in_thousands_of_tokens() -> None:
    script = files("kvfold.report").joinpath("template", "needles.js").read_text(encoding="utf-8")
    lengths = [512, 1000, 1024, 4000, 8192, 131072]
    shown = {"budget": "0.2", "lengths": lengths, "depths": [], "values": []}
    ask = f"console.log(JSON.stringify(heatmap({json.dumps(shown)})));"
    command = ["node", "-e", AROUND + script + ask]
    ran = subprocess.run(command, capture_output=True, check=True, text=True)
    head = json.loads(ran.stdout)["children"][0]["children"][0]["children"]
    told = [cell["children"][0] for cell in head]
    assert told == ["0.2", 512, "1k", "1k", "4k", "8.2k", "131.1k"]
