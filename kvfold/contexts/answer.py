# SPDX-License-Identifier: Apache-2.0
"""The text of an answer while its tokens come, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a decoder writes for a character whose last bytes are still to come.
INCOMPLETE = "\ufffd"


Ended = Literal["end", "stop", "limit"]


@dataclass(frozen=True)
class Reply:
    """An answer as it came, white space and all.

    `tokens` were generated for it. It ended at one of the model's own ("end"), at a stop string, or
    at the most tokens that were asked for ("limit").
    """

    text: str
    tokens: int
    ended: Ended


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer of this model."""
    end = model.generation_config.eos_token_id
    return [] if end is None else end if isinstance(end, list) else [end]


class Answer:
    """A stopping criterion for `generate`: hands text to `put`, and ends it at a stop string.

    `prompt` is the number of tokens before the answer; text that may turn out to begin a stop
    string is held back. `cancelled` ends the answer where it is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: int,
        stop: Sequence[str],
        put: Callable[[str], Any],
        cancelled: Event,
    ) -> None:
        self.tokenizer, self.prompt, self.stop = tokenizer, prompt, tuple(filter(None, stop))
        self.put, self.cancelled = put, cancelled
        self.text = ""
        self.stopped = False
        self._tokens: list[int] = []
        self._shown = 0
        # Text before `_read` is known; decoding goes on from `_start`, as tokens join into words.
        self._start = self._read = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Called after each token with all of them `[1, N]`; whether to stop `[1]`."""
        self._tokens = input_ids[0, self.prompt :].tolist()
        self._take(last=False)
        done = self.stopped or self.cancelled.is_set()
        return torch.tensor([done], device=input_ids.device)

    def finish(self, tokens: list[int]) -> list[int]:
        """All is generated: shows what was held back; the tokens that make up the answer's text."""
        self._tokens = tokens
        if not self.stopped:
            self._take(last=True)
        while self.stopped and tokens and len(self._decoded(tokens)) > len(self.text):
            tokens = tokens[:-1]
        return tokens

    def reply(self, generated: list[int], ends: Collection[int]) -> Reply:
        """What was finished, of all tokens that were `generated`."""
        by_itself = bool(generated) and generated[-1] in ends
        ended: Ended = "stop" if self.stopped else "end" if by_itself else "limit"
        return Reply(self.text, len(generated), ended)

    def _take(self, last: bool) -> None:
        before = self._decoded(self._tokens[self._start : self._read])
        now = self._decoded(self._tokens[self._start :])
        if not last and now.endswith(INCOMPLETE):
            return
        searched = len(self.text)
        self.text += now[len(before) :]
        if len(now) > len(before):
            # Not after a token without text: the next word's space depends on what is before it.
            self._start = self._read
        self._read = len(self._tokens)
        longest = max(map(len, self.stop), default=0)
        places = [self.text.find(stop, max(0, searched - longest)) for stop in self.stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        end = len(self.text) - (0 if self.stopped or last else self._held_back())
        if end > self._shown:
            self.put(self.text[self._shown : end])
            self._shown = end

    def _held_back(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=0)
        for count in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self.stop):
                return count
        return 0

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
