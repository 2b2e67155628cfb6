# SPDX-License-Identifier: Apache-2.0
"""Texts in many languages, from pages as Debian ships them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import texts
from kvfold.eval.tasks.languages import LANGUAGES

KEPT = "Dieser Absatz ist übersetzt &amp; lang genug, um zu bleiben."
UNTRANSLATED = "This paragraph is in the English guide, and nobody translated it."


def test_each_language_has_its_translated_paragraphs(tmp_path: Path) -> None:
    guide, out = tmp_path / "guide", tmp_path / "out"
    for name, body in {
        "en/a.html": f"<p>{UNTRANSLATED}</p>",
        "de/b.html": f"<p>{UNTRANSLATED}</p><p>Kurz.</p><p>{KEPT}</p>",
        "de/a.html": "<h1>Titel</h1><p>Der <b>erste</b>\n Absatz steht auf der Seite davor, a.</p>"
        f"<pre>apt install a-package-with-a-long-name</pre><p>{KEPT}</p>",
        "zh_CN/a.html": f"<p>{'这是一段很长的中文。' * 5}</p>",
    }.items():
        (guide / name).parent.mkdir(parents=True, exist_ok=True)
        (guide / name).write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    written = texts.write(guide, out)
    assert (out / "de.txt").read_text("utf-8").splitlines() == [
        "Der erste Absatz steht auf der Seite davor, a.",
        KEPT.replace("&amp;", "&"),
    ]
    assert "很长" in (out / "zh.txt").read_text("utf-8")
    assert written == {code: (out / f"{code}.txt").stat().st_size for code in LANGUAGES}
    assert "GNU GPL" in (out / "SOURCE.md").read_text("utf-8")
