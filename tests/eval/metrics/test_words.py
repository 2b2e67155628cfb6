# SPDX-License-Identifier: Apache-2.0
"""Words of texts in many scripts; of ASCII texts, those of rouge-score."""

import random
import string

import pytest

from kvfold.eval.metrics import overlap
from kvfold.eval.metrics.named import NAMED
from kvfold.eval.metrics.overlap import qa_f1
from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.metrics.words import marks, spaced, words


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
        if overlap.words(answer):
            assert NAMED["f1"](prediction, [answer]) == qa_f1(prediction, answer)
        assert NAMED["contains"](prediction, [answer]) == string_match_part(prediction, [answer])


# A sentence, and an unrelated one that shares its number.
SENTENCES = {
    "Chinese": ("宾客在2024年离开了这座古老的城堡", "猫喜欢在2024号房间睡觉"),
    "Russian": ("Гости покинули старый замок в 2024 году", "Кошка любит спать у окна 2024"),
    "Greek": ("Οι καλεσμένοι έφυγαν από το κάστρο το 2024", "Η γάτα κοιμάται κοντά 2024"),
    "Korean": ("손님들은 2024 년에 오래된 성을 떠났다", "고양이는 창가에서 2024 잔다"),
    "Arabic": ("غادر الضيوف القلعة القديمة عام 2024", "تنام القطة قرب النافذة 2024"),
    "Thai": ("แขกออกจากปราสาทเก่าในปี 2024", "แมวชอบนอนใกล้หน้าต่าง 2024"),
}


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize(
    "metric", ["contains", "contains_all", "exact", "f1", "rouge_l", "rouge_lsum", "code"]
)
def test_a_copy_scores_1_and_another_sentence_with_its_number_little(metric, language):
    pytest.importorskip("rouge_score")
    sentence, unrelated = SENTENCES[language]
    assert NAMED[metric](sentence, [sentence]).value == 1
    # Thai's letters, each a word here, are shared by any two texts; `code` compares letters.
    most = 0.5 if metric == "code" or language == "Thai" else 0.21
    assert NAMED[metric](unrelated, [sentence]).value < most


def test_chinese_words_by_jieba_know_a_copy_from_another_sentence():
    pytest.importorskip("jieba")
    sentence, unrelated = SENTENCES["Chinese"]
    assert NAMED["f1_zh"](sentence, [sentence]).value == 1
    assert NAMED["f1_zh"](unrelated, [sentence]).value < 0.3


@pytest.mark.parametrize("digits", ["48213", "٤٨٢١٣", "۴۸۲۱۳", "४८२१३", "４８２１３", "๔๘๒๑๓"])
@pytest.mark.parametrize("metric", ["contains", "contains_all", "exact", "f1", "rouge_l", "number"])
def test_digits_of_any_script_are_the_same_number(metric, digits):
    pytest.importorskip("rouge_score")
    assert NAMED[metric](digits, ["48213"]).value == NAMED[metric]("48213", [digits]).value == 1
    assert NAMED[metric](digits, ["48214"]).value == 0


def test_arabic_separators_are_those_of_numbers():
    assert NAMED["number"]("٤٨٬٢١٣٫٥", ["48213.5"]).value == 1


def test_digits_in_a_box_are_of_any_script():
    pytest.importorskip("math_verify")
    assert NAMED["math"]("\\boxed{٤٨}", ["48"]).value == 1


@pytest.mark.parametrize("metric", ["exact", "f1"])
def test_an_answer_of_articles_alone_is_compared_as_it_is(metric):
    assert NAMED[metric]("A", ["a"]).value == 1
    assert NAMED[metric]("an", ["a"]).value == NAMED[metric]("", ["a"]).value == 0
    assert NAMED[metric]("(A).", ["a"]).value == NAMED[metric]("A", ["A."]).value == 1
    assert NAMED[metric]("(B).", ["a"]).value == NAMED[metric]("-", ["+"]).value == 0


def test_scripts_without_spaces_are_spaced_and_others_stay():
    assert spaced("我在 2024年 C++ l'été") == "我 在 2024 年 C++ l'été"


def test_part_of_a_chinese_answer_scores_in_part():
    assert NAMED["f1"]("古老的城堡", ["古老的王宫"]).value == pytest.approx(3 / 5)
