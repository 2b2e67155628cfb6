# SPDX-License-Identifier: Apache-2.0
"""Needles in many languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.evaluate import drawn
from kvfold.eval.tasks import SampleRequest
from kvfold.eval.tasks.languages import LANGUAGES, sentences
from tests.helpers.tasks import ALL, count, made

SCRIPTS = {"ru": "[\u0400-\u04ff]", "zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u9fff]"}


@pytest.mark.parametrize("code", LANGUAGES)
def test_text_needle_and_question_are_in_the_language(code: str) -> None:
    wording = LANGUAGES[code]
    for sample in made(f"needle_{code}", 6):
        (question,) = sample.questions
        assert re.findall(r"\d+", sample.context) == list(question.answers)
        (name,) = [name for name in wording.names if name in question.text]
        assert question.answer_prefix == wording.prefix.format(name=name)
        stated = wording.needle.format(name=name, number=question.answers[0])
        # A base model that repeats the needle after the answer's first words is right.
        assert stated.startswith(question.answer_prefix) and stated in sample.context
        assert (
            ALL[f"needle_{code}"].score(stated.removeprefix(question.answer_prefix), question).value
        )
        assert sample.metadata["language"] == wording.language
        letters = [c for c in sample.prompt(question) if c.isalpha()]
        of_script = re.findall(SCRIPTS.get(code, "[A-Za-z\u00c0-\u017f]"), "".join(letters))
        assert len(of_script) == len(letters)


def test_each_language_has_other_texts() -> None:
    assert len({wording.intro for wording in LANGUAGES.values()}) == len(LANGUAGES) >= 8
    noise = [line for wording in LANGUAGES.values() for line in wording.noise]
    assert len(set(noise)) == len(noise) == 5 * len(LANGUAGES)


def test_a_folder_holds_a_text_for_each_language(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("Es regnete. Niemand\nkam vorbei! " * 200, encoding="utf-8")
    (tmp_path / "zh.txt").write_text("下雨了。没有人来！" * 900, encoding="utf-8")
    (german,) = made("needle_de", 1, haystack=tmp_path)
    assert "Es regnete. Niemand kam vorbei! " in german.context
    assert german.metadata["haystack"] == "de.txt"
    (chinese,) = made("needle_zh", 1, haystack=tmp_path)
    assert "下雨了。没有人来！下雨了。" in chinese.context
    (alone,) = made("needle_de", 1, haystack=tmp_path / "de.txt")
    assert alone == german


def test_a_missing_language_is_refused_with_the_file_that_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("Es regnete. " * 60, encoding="utf-8")
    with pytest.raises(KvfoldError, match=r"needle_fr .* French: there is no file .*fr\.txt$"):
        made("needle_fr", 1, haystack=tmp_path)
    (tmp_path / "ru.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(KvfoldError, match=r"ru\.txt is empty"):
        made("needle_ru", 1, haystack=tmp_path)


def test_a_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it.txt").write_text("Piove ancora.", encoding="utf-8")
    with pytest.raises(KvfoldError, match=r"it\.txt has \d tokens, fewer than a sample of 1500"):
        made("needle_it", 1, haystack=tmp_path)


def test_sentences_end_at_signs_of_both_kinds() -> None:
    assert sentences("Ja. Nein!\nVersion 3.5 ist\nda. ") == ["Ja.", "Nein!", "Version 3.5 ist da."]
    assert sentences("下雨了。没有人 来！好？") == ["下雨了。", "没有人 来！", "好？"]


def test_of_all_languages_those_without_a_text_are_left_out_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("Es regnete. " * 600, encoding="utf-8")
    said = list[str]()
    request = SampleRequest(samples=1, count=count, haystack=tmp_path)
    found = list(drawn(["languages"], request, [1500], said.append))
    assert [each.task.name for each in found] == ["needle_de"]
    assert len(said) == len(LANGUAGES) - 1 and all("\n" not in line for line in said)
    assert said[0].startswith("left out: needle_fr: ") and said[0].endswith("fr.txt")
