# SPDX-License-Identifier: Apache-2.0
"""Caveats: each is said where it holds."""

from __future__ import annotations

from kvfold.report import caveats
from kvfold.report.board import boards
from kvfold.report.tables import markdown
from tests.helpers.reports import HERE, MODEL, made


def test_every_caveat_is_said() -> None:
    elsewhere = HERE.model_copy(update={"cpu": "b"})
    results = [
        made(score=(3.0, 1.0)),
        made("random", "0.1", (3.0, 1.0), (0.0, -1.0, 1.0), samples=20),
        made("m", "0.1", kept=0.2, errors={"too long": 3}, failed={"no number": 2}, truncated=4),
        made("n", "0.1", task="b", setups=(elsewhere,), commits=("def-dirty",)),
        made(task="chat", metric=None, score=None),
        made("m", "0.1", task="maths", phase="decode", at_limit=60),
    ]
    found = {caveat.about: caveat.lines for caveat in caveats.board_caveats(boards(results)[0])}
    said = "\n".join(line for lines in found.values() for line in lines)
    for words in (
        "a at 1,024 tokens: 3.0 with a full cache, where guessing gives about 0",
        "a at 1,024 tokens: no difference that 20 samples show at 0.1",
        "20 samples; with half of them right, a mean is known to ±22 points",
        "n at 0.1: without a at 1,024 tokens, maths at 1,024 tokens",
        "streaming_llm (sinks + recent)",
        "m at 0.1: 0.200 of the entries",
        "4 of 100 samples",
        "maths at 1,024 tokens, m at 0.1: 60 of 100 answers",
        "3 × too long (a 1024, m 0.1)",
        "2 × no number",
        "cpu is b, there a",
        "recorded at abc, def-dirty",
        "def-dirty: with uncommitted changes",
        "chat at 1,024 tokens: not in the means",
    ):
        assert words in said, words


def test_kvzips_rows_of_the_bundled_model_have_a_caveat() -> None:
    bundled = MODEL.model_copy(update={"name": "bundled"})
    for subject, method, said in ((bundled, "kvzip", True), (MODEL, "kvzip", False),
                                  (bundled, "snapkv", False)):  # fmt: skip
        results = [made(method, "0.2", subject=subject)]
        assert ("own repeat prompt, in 15 %" in markdown(boards(results))) == said


def test_four_choices_are_guessed_right_a_quarter_of_the_time() -> None:
    assert caveats.near_guessing(made(score=(27.0, 1.0), metric="option"))
    assert not caveats.near_guessing(made(score=(27.0, 1.0), metric="match"))


def test_a_larger_budget_that_scores_less_is_said_and_explained_where_it_can_be() -> None:
    results = [made(), *(made("kvzip", b, (s, 1.0)) for b, s in (("0.2", 92.9), ("0.5", 82.8)))]
    about = "A larger budget scores less, beyond the noise"
    for name, explained in (("bundled", True), ("other", False)):
        named = MODEL.model_copy(update={"name": name})
        cells = [r.cell.model_copy(update={"subject": named}) for r in results]
        of_name = [
            r.model_copy(update={"cell": cell}) for r, cell in zip(results, cells, strict=True)
        ]
        found = {d.about: d.lines for d in caveats.board_caveats(boards(of_name)[0])}
        assert found[about][0].startswith("kvzip: 92.9 at 0.2, and 82.8 at 0.5")
        assert ("distracts a model of four layers" in found[about][0]) == explained
    near = [made(), *(made("kvzip", b, (s, 3.0)) for b, s in (("0.2", 92.9), ("0.5", 90.8)))]
    assert about not in {d.about for d in caveats.board_caveats(boards(near)[0])}
