# SPDX-License-Identifier: Apache-2.0
"""The likeliest next tokens of an endpoint, and how far two distributions are at least apart.

Tokens are known by their bytes. Two whose bytes are alike cannot be told apart, so such ones count
among the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.errors import KvfoldError

UNCLEAR = "�".encode()  # stands for bytes that are no text, of many tokens
SMALLEST = 1e-9  # a less probable token is counted among the rest
ROUNDING = 1e-6  # of sums of probabilities that engines give; a smaller rest is joined to a token
ABOVE_ONE = 1e-3  # sums of probabilities that are higher are none


@dataclass(frozen=True)
class TopTokens:
    """Probabilities of the likeliest tokens by their bytes, tokens that look alike left out.

    `first` is the likeliest one, None if it is among those left out. `read` is the number of tokens
    of the prompt, None where the endpoint does not say it.
    """

    probabilities: Mapping[bytes, float]
    first: bytes | None
    read: int | None

    @classmethod
    def of(cls, answer: Any, url: str) -> TopTokens:
        """The tokens of a chat completion; raises KvfoldError for one without probabilities."""
        try:
            listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            pairs = [(_bytes(each), float(each["logprob"])) for each in listed]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            pairs = []
        if not pairs:
            raise KvfoldError(f"{url} gives no log probabilities (logprobs, top_logprobs)")
        if any(math.isnan(logprob) for _, logprob in pairs):
            raise KvfoldError(f"{url} gives log probabilities that are no numbers")
        total = sum(math.exp(min(logprob, 1.0)) for _, logprob in pairs)
        if total > 1 + ABOVE_ONE:
            raise KvfoldError(f"{url} gives probabilities whose sum is {total:.4g}, above 1")
        if total < SMALLEST:  # which token would be the likeliest one?
            raise KvfoldError(f"{url} gives probabilities that are all 0")
        times = Counter(token for token, _ in pairs)
        clear = {
            token: math.exp(logprob)
            for token, logprob in pairs
            if token and times[token] == 1 and UNCLEAR not in token
        }
        likeliest = max(pairs, key=lambda pair: pair[1])[0]
        usage = answer.get("usage") or {}
        read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        read = read if type(read) is int and read > 0 else None
        return cls(clear, likeliest if likeliest in clear else None, read)


def _bytes(listed: Any) -> bytes:
    """Bytes of a token, or those of its text where an endpoint gives none."""
    given = listed.get("bytes")
    if isinstance(given, list):
        return bytes(given)
    # A half of a surrogate pair shows bytes that are no text, as UNCLEAR does.
    halves = str(listed["token"]).encode("utf-16", "surrogatepass")
    return halves.decode("utf-16", "replace").encode()


def kl_at_least(pairs: Iterable[tuple[float, float]]) -> float:
    """Lower bound, in nats, of the KL of two distributions, from some tokens' probabilities (p, q).

    All other tokens are one event. Whatever events are joined, the KL between the joined
    distributions is at most the whole one (the data-processing inequality).
    """
    cells = sorted(((p, q) for p, q in pairs if q >= SMALLEST), key=lambda cell: -cell[1])
    rest = [max(0.0, 1 - math.fsum(cell[side] for cell in cells)) for side in (0, 1)]
    while cells and min(rest) < ROUNDING:
        rest = [one + other for one, other in zip(rest, cells.pop(), strict=True)]
    terms = (p * math.log(p / q) for p, q in [*cells, (rest[0], rest[1])] if p > 0)
    return max(0.0, math.fsum(terms))
