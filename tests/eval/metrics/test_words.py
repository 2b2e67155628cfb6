# SPDX-License-Identifier: Apache-2.0
"""Words of texts in many scripts; of ASCII texts, those of rouge-score."""

import random
import string

import pytest

from kvfold.eval.metrics.named import NAMED
from kvfold.eval.metrics.overlap import qa_f1
from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.metrics.words import marks, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Пароль: СЛИВА-4417.", ["пароль", "слива", "4417"]),
        ("ΚΩΔΙΚΟΣ κωδικός", ["κωδικοσ", "κωδικόσ"]),
        ("비밀번호는 자두입니다", ["비밀번호는", "자두입니다"]),
        ("密码是plum_4417。", ["密", "码", "是", "plum", "4417"]),
        ("パスワード", list("パスワード")),
        ("ที่นี่", ["ที่", "นี่"]),
        ("पासवर्ड हिन्दी", ["पासवर्ड", "हिन्दी"]),
        ("كَلِمَة السر", ["كَلِمَة", "السر"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("cafe\u0301 café CAFÉ", ["café"] * 3),
        ("pass\u00adword می\u200cخواهم", ["password", "میخواهم"]),
        ("ＡＢＣ １２", ["abc", "12"]),
        ("🔑\ufe0f !?", []),
        ("", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_marks_are_the_visible_characters():
    assert marks("🔑 → ∑") == ["🔑", "→", "∑"]


def test_ascii_texts_have_the_words_of_rouge_score():
    tokenizers = pytest.importorskip("rouge_score.tokenizers")
    draw = random.Random(0)
    plain = tokenizers.DefaultTokenizer(use_stemmer=False)
    for _ in range(200):
        text = "".join(draw.choices(string.printable, k=60))
        assert words(text) == plain.tokenize(text)


@pytest.mark.parametrize("metric", ["rouge_l", "rouge_lsum"])
@pytest.mark.parametrize("text", ["密码是李子 4417", "Пароль слива 4417", "비밀번호는 자두 4417"])
def test_rouge_of_ones_own_questions_reads_any_script(metric, text):
    pytest.importorskip("rouge_score")
    assert NAMED[metric](text, [text]).value == 1
    assert NAMED[metric]("Год 4417", [text]).value < 0.5
    assert NAMED[metric]("the cat sat", ["the cat ran"]).value == pytest.approx(2 / 3)


@pytest.mark.parametrize("metric", ["contains", "contains_all", "exact", "f1"])
@pytest.mark.parametrize(
    ("prediction", "answer"),
    [
        ("北京。", "北京"),
        ("«Война и мир»…", "война и мир"),
        ("STRASSE", "Straße"),
        ("cafe\u0301", "Café"),
    ],
)
def test_marks_and_forms_of_letters_make_no_difference(metric, prediction, answer):
    assert NAMED[metric](prediction, [answer]).value == 1
    assert NAMED[metric]("else", [answer]).value == 0


def test_scores_of_ascii_texts_are_the_benchmarks():
    draw = random.Random(1)
    for _ in range(200):
        prediction, answer = ("".join(draw.choices(" aAb.,-'3$", k=6)) for _ in range(2))
        assert NAMED["f1"](prediction, [answer]) == qa_f1(prediction, answer)
        assert NAMED["contains"](prediction, [answer]) == string_match_part(prediction, [answer])
