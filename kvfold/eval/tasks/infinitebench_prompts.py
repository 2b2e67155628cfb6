# SPDX-License-Identifier: Apache-2.0
"""Prompts of InfiniteBench for open models.

Source: OpenBMB/InfiniteBench @88b3daa (MIT), `src/prompt.py::yarn_mistral_templates` and
`src/eval_utils.py::DATA_NAME_TO_MAX_NEW_TOKENS`.
"""

from __future__ import annotations

from typing import NamedTuple


class PromptTemplate(NamedTuple):
    """Texts before and after the context, the answer's first words, and its maximal length.

    Names in braces are replaced by a row's fields. `max_new_tokens` limits the answer, `group` is
    the skill tested, `summary` one line about the task.
    """

    before: str
    after: str
    answer_prefix: str
    max_new_tokens: int
    group: str
    summary: str


HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
OPTIONS = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"
MASKED = (
    "Below is a dialogue script where one random occurrence of a character name is replaced with "
    '"$$MASK$$", and you should try to guess who that character is.\n\n'
)
CALCULATE = (
    "Let us calculate the intermediate values of an expression.\n\n"
    "Expression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
    "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: "
)
READ = "Read the book and answer the question."
QUIZ = "I will quiz you about the important information"

PROMPTS: dict[str, PromptTemplate] = {
    "passkey": PromptTemplate(
        f"{HIDDEN} and memorize it. {QUIZ}.\n\n", "\n\n{input}", "\n\nThe pass key is", 6,
        "single needle", "a five-digit key in noise",
    ),
    "number_string": PromptTemplate(
        f"{HIDDEN}. {QUIZ} there.\n\n", "\n\n{input}", "\n\nThe sequence of digits is", 12,
        "single needle", "a repetitive number in noise",
    ),
    "kv_retrieval": PromptTemplate(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n",
        "\n\n{input}", "", 50, "many needles", "one UUID's value in a JSON object",
    ),
    "longbook_sum_eng": PromptTemplate(
        "Summarize the book below.\n\n", "", "\n\nSummary:", 1200,
        "summarisation", "a novel's summary",
    ),
    "longbook_choice_eng": PromptTemplate(
        f"{READ}\n\n", f"\n\nQuestion: {{input}}{OPTIONS}", "The letter of the correct answer is",
        40, "question answering", "four options about a novel",
    ),
    "longbook_qa_eng": PromptTemplate(
        f"{READ} Be very concise in your answer.\n\n", "\n\nQuestion: {input}", "\nAnswer:", 40,
        "question answering", "questions about a novel",
    ),
    "longbook_qa_chn": PromptTemplate(
        "阅读以下书籍然后回答问题。\n\n", "\n\n问题：{input}", "\n答案：", 40,
        "question answering", "questions about a Chinese novel",
    ),
    "longdialogue_qa_eng": PromptTemplate(
        MASKED, "", "\n\nThe name that has been replaced with $$MASK$$ is likely", 40,
        "question answering", "who speaks in a script",
    ),
    "math_find": PromptTemplate(
        "{first}\n\n", "\n\n{input}", "", 3, "aggregation", "an extreme or a median of a list",
    ),
    "math_calc": PromptTemplate(
        CALCULATE, "", "\nValues:", 30_000, "tracing", "every step of a long sum",
    ),
    "code_run": PromptTemplate(
        "There is a function called {func} in the following Python code.\n\n",
        "\n\nPlease compute the exact value of {call}.", " The value of {call} is", 5,
        "code", "what nested functions return",
    ),
    "code_debug": PromptTemplate(
        "Following is a Python code where exactly one of the functions/methods has a deliberate "
        "error that makes it crash.\n\n",
        f"\n\nOptions:{OPTIONS}", "The correct option is:", 5,
        "code", "the function that was broken",
    ),
}  # fmt: skip
