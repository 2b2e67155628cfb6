# SPDX-License-Identifier: Apache-2.0
"""What is said of a field that a request may not have, or not so."""

from __future__ import annotations

import re
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
    "moderation": "kvfold serve moderates no texts",
    "tool_calls": TOOLS,
}
# By pydantic's type of an error, with its values.
WORDS = {
    "missing": "the field is missing",
    "int_parsing": "a whole number is wanted",
    "int_parsing_size": "a smaller number is wanted",
    "int_from_float": "a whole number is wanted",
    "string_unicode": "half a character (a lone surrogate) is no text",
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
    "string_pattern_mismatch": "an id is 1 to 64 lower-case letters, digits, _ and -, the first "
    "one a letter or digit",
    "literal_error": "the value must be {expected}",
    "value_error": "{error}",
}
OTHER_KIND = "the value is of another kind than kvfold serve takes"
# The same, of a whole body.
OF_BODIES = {
    "json_invalid": "the body is no JSON: {error}",
    "missing": "the body is empty: send a JSON object",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "the body is no JSON object"
    ),
}
# Fields that others have for what kvfold serve calls otherwise.
INSTEAD = {
    "compression_ratio": "budget is the part kept",
    "document": "the text is in the field text",
    "press": "the method is in the field method",
    "ratio": "budget is the part kept",
    "template": "arguments of the chat template are in the field chat_template_kwargs",
}
ONE_PROMPT = "kvfold serve takes one prompt in a request"
NO_RATIO = "a part of the tokens is at most 1: for a number of tokens give a whole number"
PARTS = "kvfold serve reads parts of the type text only"


def refusal_of(place: str | None, error: Any) -> str:
    """What is said of one of pydantic's errors, about the field at a dotted `place`."""
    kind, values = error["type"], error.get("ctx", {})
    if (absent := absent_at(place)) is not None:
        return f"{absent}: leave the field out"
    if place is None and kind in OF_BODIES:
        return OF_BODIES[kind].format(**values)
    if place == "budget" and kind == "less_than_equal":
        return NO_RATIO
    if place == "prompt" and kind == "too_long":
        return ONE_PROMPT
    if place in INSTEAD and kind == "extra_forbidden":
        return f"kvfold serve does not know this field: {INSTEAD[place]}"
    if kind == "literal_error" and re.fullmatch(r"messages\.\d+\.content\.\d+\.type", place or ""):
        return PARTS
    return WORDS.get(kind, OTHER_KIND).format(**values)


def absent_at(place: str | None) -> str | None:
    """What the server does not have, of a field at a dotted place, or of a message's field."""
    parts = (place or "").split(".")
    field = parts[2] if parts[0] == "messages" and len(parts) > 2 else parts[0]
    return ABSENT.get(field)
