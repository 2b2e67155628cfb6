# SPDX-License-Identifier: Apache-2.0
"""Spans: half-open ranges `(start, stop)` of a row's tokens, padding not counted."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.hf.arguments import checked_arguments

Span = tuple[int, int]

# A decoder's output for a character whose last bytes are missing
_INCOMPLETE = "\ufffd"


@checked_arguments
def span(
    tokenizer: Any,
    text: str,
    part: str,
    *,
    occurrence: int | None = None,
    add_special_tokens: bool = True,
) -> Span:
    """Token range of `part` inside `text`, for `protect=`.

    Args:
        tokenizer: the model's; without character offsets, the range is found by decoding.
        text: the whole text that is tokenized, chat template included.
        part: the text to find, as it is written in `text`.
        occurrence: which one, from 0, where `part` occurs several times.
        add_special_tokens: as in the call that tokenizes `text`; False where a chat template wrote
            the special tokens.

    A token with characters of `part` and of the text around it belongs to the span. Raises
    KvfoldError if `part` is not in `text`, or occurs several times and none was chosen.
    """
    starts, begin = _starts(text, part), _begin(text, part, occurrence)
    ids = tokenizer(text, add_special_tokens=add_special_tokens).input_ids

    def holds(found: Span | None) -> bool:
        return found is not None and _bare(part) in _bare(_decoded(tokenizer, ids[slice(*found)]))

    found = _by_offsets(tokenizer, text, begin, begin + len(part), add_special_tokens)
    if not holds(found):
        found = _by_decoding(tokenizer, ids, part, starts.index(begin), len(starts))
    if found is not None and holds(found):
        return found
    raise KvfoldError(
        f"the tokens of {_shown(part)} cannot be found for certain, as {type(tokenizer).__name__} "
        "changes the text: give protect= their range `(start, stop)`"
    )


def span_in(tokenizer: Any, ids: list[int], part: str, occurrence: int | None = None) -> Span:
    """Token range of `part` in the text of `ids`; `occurrence` and errors as for `span`."""
    text = _decoded(tokenizer, ids)
    starts, begin = _starts(text, part), _begin(text, part, occurrence)
    found = _by_decoding(tokenizer, ids, part, starts.index(begin), len(starts))
    assert found is not None  # as the text is what the ids spell
    return found


def opening_length(ids: Tensor, opening: Tensor) -> int:
    """Number of the first tokens of `ids [n]` that are a template's `opening [m]`, 0 without it.

    The opening's last token may have merged with the first characters of the text.
    """
    first = ids[: len(opening)]
    alike = int((first == opening[: len(first)].to(ids)).byte().cumprod(0).sum())
    return alike if alike >= len(opening) - 1 else 0


def spans_of(protect: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    """Checked spans; raises KvfoldError for anything but pairs of whole numbers, start below stop.

    numpy's and torch's whole numbers count as such.
    """
    listed = isinstance(protect, Iterable) and not isinstance(protect, str | bytes)
    if not listed:
        raise _no_span(protect)
    return tuple(_checked(each) for each in protect)


def span_of(given: Any) -> Span:
    """A checked span of an edit; raises KvfoldError as `spans_of`."""
    try:
        return _checked(tuple(given))
    except (TypeError, KvfoldError):
        raise KvfoldError(
            f"a span is a pair `(start, stop)` of token indices, start below stop, not "
            f"{_shown(given)}: context.span(part) finds that of a document's part"
        ) from None


def whole_number(given: Any) -> int:
    """A token's index, of Python, numpy or torch; raises KvfoldError for anything else."""
    try:
        return operator.index(given)
    except TypeError:
        raise KvfoldError(f"a token is named by its index, not by {_shown(given)}") from None


def _checked(given: Any) -> Span:
    try:
        start, stop = (operator.index(end) for end in given)
    except (TypeError, ValueError):
        raise _no_span(given) from None
    if not 0 <= start < stop:
        raise _no_span((start, stop))
    return start, stop


def _no_span(given: Any) -> KvfoldError:
    return KvfoldError(
        "protect takes a list of spans `(start, stop)` of token indices, start below stop, and not "
        f"{_shown(given)}: kvfold.span(tokenizer, text, part) finds the span of a text's part"
    )


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _begin(text: str, part: str, occurrence: int | None) -> int:
    """The character of `text` at which the chosen occurrence of `part` begins."""
    starts = _starts(text, part)
    if not starts:
        raise KvfoldError(f"{_shown(part)} is not in the text: write it as it stands there")
    if occurrence is None and len(starts) > 1:
        raise KvfoldError(
            f"{_shown(part)} occurs {len(starts)} times: give more of what surrounds it, or a "
            f"span, by kvfold.span or Context.span with occurrence=0 to {len(starts) - 1}"
        )
    if not 0 <= (occurrence or 0) < len(starts):
        raise KvfoldError(
            f"{_shown(part)} occurs {len(starts)} times, from occurrence=0 on, so there is no "
            f"occurrence={occurrence}"
        )
    return starts[occurrence or 0]


def _starts(text: str, part: str) -> list[int]:
    """The characters at which `part` begins, occurrences that overlap included."""
    starts, at = [], text.find(part) if part else -1
    while at >= 0:
        starts.append(at)
        at = text.find(part, at + 1)
    return starts


def _by_offsets(tokenizer: Any, text: str, begin: int, end: int, special: bool) -> Span | None:
    """Range of the tokens whose characters overlap `begin` to `end`; None without offsets."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    inside = [i for i, (a, b) in enumerate(encoded.offset_mapping) if a < end and b > begin]
    return (inside[0], inside[-1] + 1) if inside else None


def _by_decoding(
    tokenizer: Any, ids: list[int], part: str, which: int, occurrences: int
) -> Span | None:
    """The shortest range whose text holds the occurrence; None where decoding changes the text."""
    starts = _starts(_decoded(tokenizer, ids), part)
    if len(starts) != occurrences:
        return None

    def characters(count: int) -> tuple[int, int]:
        """Number of characters that the first `count` tokens complete, and that they begin."""
        text = _decoded(tokenizer, ids[:count])
        complete = len(text.rstrip(_INCOMPLETE))
        return complete, complete + text.endswith(_INCOMPLETE)

    begin, end, counts = starts[which], starts[which] + len(part), range(len(ids) + 1)
    start = bisect_right(counts, begin, key=lambda count: characters(count)[1]) - 1
    return start, bisect_left(counts, end, key=lambda count: characters(count)[0])


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _bare(text: str) -> str:
    """The text without white space and case, which tokenizers change."""
    return "".join(text.split()).casefold()
