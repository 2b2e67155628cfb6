# SPDX-License-Identifier: Apache-2.0
"""Text of an answer while it is generated: decoding, stop strings, and why it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.generation.generate import generate

# Decoders write this for a character some of whose bytes are in tokens still to come.
INCOMPLETE = "\ufffd"
# Tokens of one byte (`<0xE4>`): if one of a run is no UTF-8, the whole run is decoded as such.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Last characters that a tokenizer's clean-up of spaces may still change: " n '" becomes "n't".
CLEANED_UP = 6


Ended = Literal["end", "stop", "limit"]


@dataclass(frozen=True)
class Reply:
    """A finished answer.

    Args:
        text: the answer with its white space, without end token and stop string.
        tokens: number of generated tokens, the end token included.
        ended: "end" at an end token of the model, "stop" at a stop string, "limit" at
            `max_new_tokens`.
    """

    text: str
    tokens: int
    ended: Ended


# Options of `generate` for one greedy answer, whatever a model's generation settings say.
GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Ids of the tokens that end an answer of this model; empty if it has none."""
    end = model.generation_config.eos_token_id
    return [] if end is None else end if isinstance(end, list) else [end]


def without_end(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """`tokens` without the end token, which the chat template puts before the next turn."""
    return list(tokens[:-1] if tokens and tokens[-1] in end_tokens(model) else tokens)


def generate_answer(
    model: PreTrainedModel,
    cache: CompressedCache,
    asked: Tensor,
    answer: AnswerStream,
    options: dict[str, Any],
) -> list[int]:
    """Generated tokens after `asked [1, N]`, all tokens so far; greedy unless `options` say so.

    `cache` has read some of them, but not the last. `options` are those of `model.generate`.
    """
    criteria = [*(options.get("stopping_criteria") or []), answer]
    own = {"stopping_criteria": criteria, "return_dict_in_generate": False}
    own |= {"allow_longer": True}  # checked when the turn was made
    given = {"do_sample": False} | options | own
    out = generate(model, asked, cache=cache, attention_mask=torch.ones_like(asked), **given)
    tokens: list[int] = out[0, asked.shape[1] :].tolist()
    return tokens


class NumbersOnly:
    """A logits processor that changes nothing; raises KvfoldError if no row's are numbers."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any(-1).all()):
            raise KvfoldError(
                "the model's predictions are no numbers: load it in bfloat16 or float32"
            )
        return scores


class AnswerStream:
    """Stopping criterion for `generate` that streams text to `put` and ends at a stop string.

    `prompt` is the number of prompt tokens. Text that may be the start of a stop string, or that
    the tokenizer may still change, is held back until the next tokens decide. All text together is
    what the tokenizer decodes all tokens to. Setting `cancelled` ends the answer at the next token.
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
        # Tokens before `_read` are decoded. Decoding restarts at `_start`, a little earlier, as the
        # text of a token depends on the ones before it.
        self._start = self._read = 0
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        # Some are special by their own, and have no name that `all_special_ids` goes by.
        self._skipped = {token for token, kind in added.items() if kind.special}
        self._skipped.update(getattr(tokenizer, "all_special_ids", ()))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True `[1]` to stop; called after each token with all token ids `[1, N]`."""
        self._tokens = input_ids[0, self.prompt :].tolist()
        self._decode_new(last=False)
        done = self.stopped or self.cancelled.is_set()
        return torch.tensor([done], device=input_ids.device)

    def finish(self, tokens: list[int]) -> list[int]:
        """Streams text held back; returns the `tokens` whose text is before the stop string."""
        self._tokens = tokens
        if not self.stopped:
            self._decode_new(last=True)
        while self.stopped and tokens and len(self._decoded(tokens)) > len(self.text):
            tokens = tokens[:-1]
        return tokens

    def reply(self, generated: list[int], ends: Collection[int]) -> Reply:
        """The finished answer; `generated` are all its tokens, `ends` the model's end tokens."""
        by_itself = bool(generated) and generated[-1] in ends
        ended: Ended = "stop" if self.stopped else "end" if by_itself else "limit"
        return Reply(self.text, len(generated), ended)

    def _decode_new(self, last: bool) -> None:
        if last or self._cleans_up:
            text = self._decoded(self._tokens)
        else:
            before = self._decoded(self._tokens[self._start : self._read])
            now = self._decoded(self._tokens[self._start :])
            text = self.text + now[len(before) :]
        if not last and (text.endswith(INCOMPLETE) or self._is_within_bytes()):
            return
        if len(text) > len(self.text):
            # Not after a token without text: the next word's space depends on the token before it.
            self._start = self._read
        self.text, self._read = text, len(self._tokens)
        # None begins in what was shown.
        places = [self.text.find(stop, self._shown) for stop in self.stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        end = len(self.text) if self.stopped or last else self._settled()
        if end > self._shown:
            self.put(self.text[self._shown : end])
            self._shown = end

    def _is_within_bytes(self) -> bool:
        """True if the last token with a text is one of bytes, to which more may come."""
        last = next((token for token in reversed(self._tokens) if token not in self._skipped), None)
        return last is not None and bool(
            BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(last)))
        )

    def _settled(self) -> int:
        """Number of characters that stay, and are not the start of a stop string."""
        end = len(self.text) - (CLEANED_UP if self._cleans_up else 0)
        longest = max(map(len, self.stop), default=0)
        for count in range(min(longest - 1, end), 0, -1):
            if any(stop.startswith(self.text[end - count : end]) for stop in self.stop):
                return end - count
        return end

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
