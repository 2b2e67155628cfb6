# SPDX-License-Identifier: Apache-2.0
"""What is said of a field that a request may not have, or not so."""

from __future__ import annotations

from typing import Any

TOOLS = "kvfold serve has no tools"
ONE = "kvfold serve gives one answer to a request"
PENALTY = "kvfold serve has no such penalty, and takes repetition_penalty"
LOGPROBS = "kvfold serve gives no log probabilities"
# What the server does not have, by field.
ABSENT = {
    "tools": TOOLS,
    "tool_choice": TOOLS,
    "functions": TOOLS,
    "function_call": TOOLS,
    "n": ONE,
    "best_of": ONE,
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "logprobs": LOGPROBS,
    "top_logprobs": LOGPROBS,
    "logit_bias": "kvfold serve has no bias of single tokens",
    "response_format": "kvfold serve answers in plain text, without JSON mode or a schema",
    "modalities": "kvfold serve answers in text",
    "audio": "kvfold serve answers in text",
    "prediction": "kvfold serve takes no predicted output",
    "verbosity": "kvfold serve has no verbosity but medium",
    "service_tier": "kvfold serve has no tiers",
    "web_search_options": "kvfold serve searches no web",
    "echo": "kvfold serve does not repeat the prompt",
    "suffix": "kvfold serve continues a text at its end only",
}
# By pydantic's type of an error, with its values.
WORDS = {
    "missing": "the field is missing",
    "extra_forbidden": "kvfold serve does not know this field: leave it out",
    "string_type": "a text is wanted",
    "int_type": "a whole number is wanted",
    "float_type": "a number is wanted",
    "bool_type": "true or false is wanted",
    "list_type": "a list is wanted",
    "dict_type": "an object is wanted",
    "model_type": "an object is wanted",
    "model_attributes_type": "an object is wanted",
    "none_required": "kvfold serve takes null only: leave the field out",
    "finite_number": "a finite number is wanted",
    "greater_than": "the number must be above {gt}",
    "greater_than_equal": "the number must be at least {ge}",
    "less_than": "the number must be below {lt}",
    "less_than_equal": "the number must be at most {le}",
    "too_long": "at most {max_length} entries are taken",
    "too_short": "at least {min_length} entries are wanted",
    "string_too_long": "at most {max_length} characters are taken",
    "string_too_short": "at least {min_length} characters are wanted",
    "string_pattern_mismatch": "the text must match {pattern}",
    "literal_error": "the value must be {expected}",
    "value_error": "{error}",
}


def refusal_of(place: str | None, error: Any) -> str:
    """What is said of one of pydantic's errors, about the field at a dotted `place`."""
    first = (place or "").partition(".")[0]
    if first in ABSENT:
        return f"{ABSENT[first]}: leave the field out"
    words = WORDS.get(error["type"])
    return str(error["msg"]) if words is None else words.format(**error.get("ctx", {}))
