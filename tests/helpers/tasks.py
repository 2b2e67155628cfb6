# SPDX-License-Identifier: Apache-2.0
"""Samples that a task makes or reads, and a way to count tokens."""

import json
import re

from kvfold.eval.tasks import SampleRequest, tasks

ALL = tasks()
ESSAYS = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"
)  # fmt: skip


def count(text):
    """Pieces of words and signs, about what a tokenizer makes of English."""
    return len(re.findall(r" ?\w{1,5}|\W", text))


def made(name, samples=2, **options):
    """Records of a generated task."""
    options = {"length": 1500, "count": count, "samples": samples, **options}
    return list(ALL[name].samples(SampleRequest(**options)))


def read(name, rows, tmp_path, **options):
    """Records of a task from rows in a file."""
    file = tmp_path / "rows.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    return list(ALL[name].samples(SampleRequest(data=str(file), **options)))


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Passage {article}.{part} is about topic {article}.",
                    "qas": [
                        {
                            "question": f"What is passage {article}.{part} about?",
                            "is_impossible": part == 1,
                            "answers": [{"text": f"topic {article}"}, {"text": f"{article}"}],
                        }
                    ],
                }
                for part in range(3)
            ]
        }
        for article in range(40)
    ]
}
HOTPOT = [
    {
        "question": f"Who knows {n}?",
        "answer": f"Person {n}",
        "context": [[f"Title {n}", [f"Person {n} knows ", f"{n}."]], [f"Other {n}", ["Nothing."]]],
    }
    for n in range(60)
]


def longbench_row(task, **fields):
    return {
        "dataset": task,
        "language": "en",
        "context": "A {context} with {input} braces.",
        "input": "Who?",
        "answers": ["Bob", "Robert"],
        "all_classes": ["Bob", "Eve"],
        "length": 4200,
        **fields,
    }
