# SPDX-License-Identifier: Apache-2.0
"""A client of OpenAI-compatible endpoints that asks for the distribution of one token."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from kvfold.checks.engines.tokens import TopTokens
from kvfold.errors import KvfoldError

PATIENCE = 600  # seconds for an answer, of which a long prompt may take most
LONGEST = 1 << 24  # bytes of an answer
ASKED = (20, 10, 5, 1)  # likeliest tokens; most engines allow 20
REFUSED = (400, 422)  # status of a request with more log probabilities than are allowed
BUSY = (429, 503)  # status of an endpoint that will answer later
WAITS = (1, 2, 4, 8)  # seconds before a busy one is asked again
SHOWN = 200  # characters of an endpoint's message
KEY, REFERENCE_KEY = "OPENAI_API_KEY", "REFERENCE_API_KEY"  # environment variables


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected request would take the key to another host, and lose its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


class EndpointRefusal(KvfoldError):
    """An endpoint's error, with its HTTP `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """An endpoint at `url`, which ends in /v1, with the `model` and number of tokens to ask for."""

    url: str
    model: str
    key: str | None
    top: int

    @classmethod
    def of(cls, given: str, key: str | None, messages: Sequence[Mapping[str, str]]) -> Endpoint:
        """The endpoint at an address as a user writes it, `http://host:8000/v1#model`.

        It is tried with `messages`. Raises KvfoldError for an address that cannot be, an endpoint
        that does not answer, serves no such model or several, or gives no log probabilities.
        """
        url, model = split_address(given)
        model = _model(url, key, model)
        for top in ASKED:
            made = cls(url, model, key, top)
            try:
                made.top_tokens(messages)
            except EndpointRefusal as problem:
                if problem.status not in REFUSED:
                    raise
                refusal = problem
            else:
                return made
        raise KvfoldError(f"{refusal}; a check needs log probabilities of a chat completion")

    def top_tokens(self, messages: Sequence[Mapping[str, str]]) -> TopTokens:
        """The likeliest tokens after `messages`.

        Raises KvfoldError for an error, and for an answer without log probabilities.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": self.top,
        }
        return TopTokens.of(_answer(f"{self.url}/chat/completions", self.key, body), self.url)


def split_address(given: str) -> tuple[str, str | None]:
    """The address of the API, and the model's name behind "#" if there is one.

    Raises KvfoldError for an address without host, and with a password or query.
    """
    try:
        parts = urlsplit(given)
        _ = parts.port
    except ValueError as problem:
        raise KvfoldError(f"{given.partition('#')[0]!r} is no address: {problem}") from None
    if "@" in parts.netloc or parts.query:
        raise KvfoldError(
            f"an address has no user, password or query: give a key by the variable {KEY}"
        )
    host = parts.hostname or ""
    labels = host.removesuffix(".").split(".") if ":" not in host else [host]
    named = all(0 < len(label) < 64 for label in labels) and (parts.netloc + parts.path).isascii()
    if not named or not given.isprintable() or " " in parts.netloc + parts.path:
        raise KvfoldError(f"{given!r} is no address: give for example http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    url = urlunsplit((parts.scheme.lower(), parts.netloc, path or "/v1", "", ""))
    return url, parts.fragment or None


def key_of(given: str, endpoint: str | None = None) -> str | None:
    """The key of an address; of a reference at another host than `endpoint`, one of its own."""
    own = endpoint is None or urlsplit(given).netloc == urlsplit(endpoint).netloc
    key = os.environ.get(KEY if own else REFERENCE_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise KvfoldError(f"the variable {KEY if own else REFERENCE_KEY} holds no key")
    return key or None


def _model(url: str, key: str | None, wanted: str | None) -> str:
    """The model of that name, or the only one; raises KvfoldError for none and several."""
    try:
        listed = [str(each["id"]) for each in _answer(f"{url}/models", key)["data"]]
    except (LookupError, TypeError):
        listed = [""]
    if not all(name and name.isprintable() for name in listed):
        raise KvfoldError(f"{url}/models lists no models: is it an OpenAI endpoint?")
    if wanted in listed:
        return wanted
    names = ", ".join(listed[:10]) or "none"
    if wanted is not None:
        raise KvfoldError(f"{url} serves no model {wanted!r}; it serves: {names}")
    if len(listed) != 1:
        raise KvfoldError(f"{url} serves {names}: name one, as {url}#{(listed or ['MODEL'])[0]}")
    return listed[0]


def _answer(url: str, key: str | None, body: Mapping[str, Any] | None = None) -> Any:
    """As `_first_answer`, which is asked for again where the endpoint is busy."""
    for wait in WAITS:
        try:
            return _first_answer(url, key, body)
        except EndpointRefusal as refusal:
            if refusal.status not in BUSY:
                raise
        time.sleep(wait)
    return _first_answer(url, key, body)


def _first_answer(url: str, key: str | None, body: Mapping[str, Any] | None) -> Any:
    """The JSON of an answer; raises KvfoldError where none comes, EndpointRefusal for an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=PATIENCE) as answer:
            text = _read(answer, url)
    except urllib.error.HTTPError as problem:
        with problem:
            said = _message(problem)
        if key is not None:  # which some servers repeat
            said = said.replace(key, "…")
        raise EndpointRefusal(f"{url} answers {problem.code}: {said}", problem.code) from None
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise KvfoldError(f"{url} does not answer: {reason or type(problem).__name__}") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise KvfoldError(f"{url} answers no JSON: is it an OpenAI endpoint?") from None


def _read(answer: Any, url: str) -> bytes:
    """The body of an answer; raises KvfoldError for one too long, cut off, or without end."""
    end, text = time.monotonic() + PATIENCE, b""
    said = answer.length  # Content-Length, which `read1` does not check
    while piece := answer.read1(LONGEST):
        text += piece
        if len(text) > LONGEST:
            raise KvfoldError(
                f"{url} answers more than {LONGEST >> 20} MiB: is it an OpenAI endpoint?"
            )
        if time.monotonic() > end:
            raise KvfoldError(f"{url} has not answered within {PATIENCE} s")
    if said is not None and len(text) < said:
        raise KvfoldError(f"{url} hung up after {len(text)} of {said} bytes: is it running still?")
    return text


def _message(problem: urllib.error.HTTPError) -> str:
    """The message of an error, in OpenAI's form or another, as one line."""
    try:
        text = problem.read(1 << 20).decode(errors="replace")
        found = json.loads(text)
        while isinstance(found, dict):  # {"error": {"message": ...}}, {"detail": ...}
            found = next((found[n] for n in ("error", "message", "detail") if n in found), text)
    except (ValueError, RecursionError, OSError, HTTPException):
        found = problem.reason
    shown = "".join(each if each.isprintable() else " " for each in str(found))
    return " ".join(shown.split())[:SHOWN]
