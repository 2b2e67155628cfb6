# SPDX-License-Identifier: Apache-2.0
"""vLLM's text completions converted to chat completions.

The proxy sends conversations over a context as token ids, which only `/v1/completions` takes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from kvfold.serve.events import DATA, event

DONE = "[DONE]"


def message(completion: dict[str, Any]) -> dict[str, Any]:
    """A complete chat completion."""
    choices = [
        _choice(choice) | {"message": {"role": "assistant", "content": choice["text"]}}
        for choice in completion["choices"]
    ]
    return _renamed(completion, "chat.completion", choices)


async def lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines of an event stream, split at "\\n" only.

    JSON may hold other line separators unescaped, such as U+2028 and U+0085.
    """
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode()
    if rest:
        yield rest.decode()


async def chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Events of a chat stream from those of a completion; errors of vLLM pass unchanged."""
    opening = {"role": "assistant"}
    async for line in lines(pieces):
        if not line.startswith(DATA):
            continue
        content = line.removeprefix(DATA)
        if content == DONE or "choices" not in (piece := json.loads(content)):
            yield f"{line}\n\n"
            continue
        choices = [
            _choice(choice) | {"delta": opening | {"content": choice["text"]}}
            for choice in piece["choices"]
        ]
        opening = {}
        made = _renamed(piece, "chat.completion.chunk", choices)
        yield event(made)


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}


def _renamed(
    completion: dict[str, Any], kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    kept = {name: completion[name] for name in ("created", "model")}
    name = str(completion["id"]).replace("cmpl-", "chatcmpl-", 1)
    made = {"id": name, "object": kind, **kept, "choices": choices}
    return made | ({"usage": completion["usage"]} if completion.get("usage") else {})
