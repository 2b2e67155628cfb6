# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results/models.md: `python -m docs.generate.models RECORDS [CLASS ...]`.

Runs the six checks of `model_checks.py` on every class, or on those named, and adds a line of JSON
for each to RECORDS; classes that have one are left out, so that a run can be resumed. The page's
block is then written anew from all records.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from docs.generate.made import DOCS, table, write_part
from docs.generate.model_checks import CHECKS, REFUSED, RIGHT, UNTOLD, WRONG, Outcome, check
from docs.generate.tiny_models import architectures
from kvfold.evidence.grouped import grouped

PAGE = DOCS / "results" / "models.md"
BEGIN = "<!-- made by docs/generate/models.py: begin -->"
SIGNS = {RIGHT: "✓", REFUSED: "refused", WRONG: "✗", UNTOLD: "–"}
Outcomes = Mapping[str, Outcome]


def main() -> None:
    """Checks what has no record, and writes the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    records, names = Path(sys.argv[1]), sys.argv[2:] or list(architectures())
    known = dict(_read(records))
    for name in names:
        if name not in known:
            known[name] = check(name)
            _add(records, name, known[name])
            print(name, *(f"{of}: {o.verdict}" for of, o in known[name].items()), flush=True)
            gc.collect()
    write_part(PAGE, BEGIN, block(known))


def block(known: Mapping[str, Outcomes]) -> str:
    """The tables, as Markdown."""
    run = {name: of for name, of in known.items() if "cache" not in of}
    right = [name for name, of in run.items() if all(o.verdict == RIGHT for o in of.values())]
    refused, failed, unbuilt = (
        {n: of["cache"] for n, of in known.items() if "cache" in of and of["cache"].verdict == as_}
        for as_ in (REFUSED, WRONG, UNTOLD)
    )
    parts = [
        f"Of {len(known)} classes in transformers {transformers.__version__}, {len(run)} take a "
        f"cache, {len(right)} of them right in all six checks; {len(refused)} are refused when the "
        f"cache is made; {len(unbuilt)} could not be measured.",
        "### Checked",
        table(["class", *CHECKS, "where not"], [row(name, of) for name, of in sorted(run.items())]),
    ]
    parts += ["### Refused", _grouped(refused)]
    if failed:
        parts += ["### Fails, with an error that is not kvfold's", _grouped(failed)]
    parts += ["### Not measured", "No tiny model can be built:", _grouped(unbuilt)]
    return "\n\n".join(parts)


def row(name: str, outcomes: Outcomes) -> list[str]:
    """A class's row of the table of checks."""
    signs = [SIGNS[outcomes[of].verdict] for of in CHECKS]
    whys = [f"{of}: {reason(name, o)}" for of, o in outcomes.items() if o.verdict != RIGHT]
    return [name, *signs, "; ".join(whys)]


def reason(name: str, outcome: Outcome) -> str:
    """Why an outcome is not right, in words that other classes share."""
    general = re.sub(rf"{name}(\.forward\(\))?", "the model", outcome.why)
    return re.sub(r"layer \d+", "a layer", general).replace("|", "\\|")


def _grouped(outcomes: Mapping[str, Outcome]) -> str:
    """A table of reasons and the classes that share each."""
    of = grouped((reason(name, outcome), name) for name, outcome in outcomes.items())
    rows = [[why, ", ".join(sorted(names))] for why, names in sorted(of.items())]
    return table(["reason", "classes"], rows)


def _read(records: Path) -> Iterator[tuple[str, Outcomes]]:
    for line in records.read_text("utf-8").splitlines() if records.is_file() else []:
        record = json.loads(line)
        yield record["class"], {of: Outcome(**o) for of, o in record["outcomes"].items()}


def _add(records: Path, name: str, outcomes: Outcomes) -> None:
    records.parent.mkdir(parents=True, exist_ok=True)
    with records.open("a", encoding="utf-8") as file:
        line = {"class": name, "outcomes": {of: asdict(o) for of, o in outcomes.items()}}
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
