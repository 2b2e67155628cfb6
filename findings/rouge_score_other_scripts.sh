#!/usr/bin/env bash
# rouge-score 0.1.2 (Python 3.11): ROUGE-L between a text and itself is 0.0 where the text is in Chinese,
# Russian, Greek or Korean (the scorer of InfiniteBench and SCBench), and 1.0 between two different texts that share only a number: its default
# tokenizer replaces everything but a-z and 0-9 by spaces. No warning is given. A tokenizer of one's own,
# RougeScorer(tokenizer=...), gives 1.0 for equal texts.
# Output seen:
#   a text and itself: [0, 0, 0, 0] two texts with one number: 1.0 by spaces: [1.0, 1.0, 1.0, 1.0]
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet rouge-score==0.1.2

"$folder/venv/bin/python" - <<'PYTHON'
from rouge_score.rouge_scorer import RougeScorer


class Spaces:
    def tokenize(self, text):
        return text.split()


def rouge_l(one, other, tokenizer=None):
    return RougeScorer(["rougeL"], tokenizer=tokenizer).score(one, other)["rougeL"].fmeasure


secrets = ["密码是李子", "Пароль: слива", "Ο κωδικός είναι δαμάσκηνο", "비밀번호는 자두입니다"]
equal = [rouge_l(text, text) for text in secrets]
number = rouge_l("Пароль: слива 4417", "Год 4417")
own = [rouge_l(text, text, Spaces()) for text in secrets]
print("a text and itself:", equal, "two texts with one number:", number, "by spaces:", own)
assert equal == [0.0] * 4 and number == 1.0 and own == [1.0] * 4
PYTHON
