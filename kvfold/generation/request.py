# SPDX-License-Identifier: Apache-2.0
"""A call of `kvfold.generate`, checked as a whole before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.generation import inputs, pieces
from kvfold.generation.assisted import ASSISTED, check_assistable
from kvfold.generation.length import check_prompt
from kvfold.generation.readers.layerwise import check_whole
from kvfold.generation.reading import piece_turns
from kvfold.generation.resume import Resumption, Reuse, past_switch, resumption
from kvfold.generation.static.captured import check_captured
from kvfold.generation.static.decode import NEW_TOKENS, check_steps
from kvfold.hf.lookups import check_answer, check_tokens
from kvfold.hf.recurrent import restarts

# Time of a prompt's compression
Compress = Literal["at_end", "per_chunk"]


@dataclass(frozen=True)
class How:
    """Options of `kvfold.generate` that `model.generate` lacks."""

    prefill_chunk: int | None = None
    compress: Compress = "at_end"
    compile: bool = False
    capture: bool = False
    allow_longer: bool = False
    reuse: Reuse | None = None

    @property
    def per_chunk(self) -> bool:
        """True if each piece of the prompt is compressed."""
        return self.compress == "per_chunk"


@dataclass(frozen=True)
class Request:
    """A call whose arguments go together; to make it changes nothing in the cache.

    input_ids and mask `[B, N]`; `options` are those of `model.generate`, `settings` what it makes
    of them. The cache goes on from `resumed`, reads columns up to `stop`, and then `model.generate`
    reads the rest of the prompt, in `rows` rows of each, and generates at most `new` tokens.
    `features` names images or sound of a later turn.
    """

    model: PreTrainedModel
    cache: CompressedCache
    input_ids: Tensor
    mask: Tensor
    how: How
    options: dict[str, Any]
    settings: Any
    resumed: Resumption
    stop: int
    rows: int
    new: int
    features: str

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        cache: CompressedCache | None,
        input_ids: Tensor | None,
        mask: Tensor | None,
        how: How,
        options: dict[str, Any],
    ) -> Request:
        """The request of a call; raises as `generate` does."""
        inputs.check_given(input_ids, cache, mask, options)
        assert input_ids is not None and cache is not None
        total = input_ids.shape[1]
        chunk = pieces.piece_of(how.prefill_chunk, total)
        mask = inputs.leading_padding(model, input_ids) if mask is None else mask
        check_compress(how.compress)
        piece = how.prefill_chunk if how.per_chunk else None
        check_prompt(model, cache, mask, piece, how.allow_longer)
        if how.per_chunk:
            pieces.check_per_chunk(cache.method, piece)
        assisted, settings = is_assisted(options), settings_of(model, options)
        inputs.check_settings(settings, options)
        check_tokens(model, input_ids)
        new = new_tokens(settings, total)
        check_answer(model, mask, new)
        if how.compile or how.capture:
            check_graph(model, cache, how, settings, options)
            cache.binding.check_length(total + max(0, new - 1))
        resumed = past_switch(model, resumption(cache, input_ids, mask, how.reuse), total, new)
        inputs.check_windows(resumed, mask)
        rows, stop = 1, total - 1
        if assisted:
            check_assistable(model, cache, settings)
        else:
            rows = max(settings.num_beams or 1, settings.num_return_sequences or 1)
            stop = _columns_ahead(model, resumed, total, new, chunk, rows, how.per_chunk)
            stop = max(stop, pieces.before_padding(mask, resumed.seen))
        made = cls(
            model,
            cache,
            input_ids,
            mask,
            how,
            options,
            settings,
            resumed,
            stop,
            rows,
            new,
            features=inputs.later_features(model, resumed, input_ids, options),
        )
        made._check_reading(chunk)
        return made

    @property
    def assisted(self) -> bool:
        """True if drafts are checked on the frozen cache."""
        return is_assisted(self.options)

    def _check_reading(self, chunk: int) -> None:
        """Raises KvfoldError for a prompt that cannot be read up to `stop`, `chunk` at a time."""
        model, cache, mask = self.model, self.cache, self.mask
        seen, stop = self.resumed.seen, self.stop
        if self.resumed.own_forwards:
            check_whole(cache.method, chunk, stop)
        pieces.check_padding(mask, seen, stop, chunk, self.how.per_chunk)
        if self.assisted or stop > seen:
            ahead = mask[:, seen:stop]
            inputs.check_read_ahead(model, self.resumed, self.settings, self.options, ahead)
        if stop > seen and self.how.per_chunk:
            piece_turns(model, cache, mask, seen, stop, chunk)
        elif stop > seen:
            pieces.forwards_of(model, cache, mask, seen, stop, chunk)


def _columns_ahead(
    model: PreTrainedModel,
    resumed: Resumption,
    total: int,
    new: int,
    chunk: int,
    rows: int,
    per_chunk: bool,
) -> int:
    """The columns to read before `model.generate` reads the rest.

    `new` tokens are generated at most, in `rows` rows of each prompt (beams, or answers).
    """
    cache, seen = resumed.cache, resumed.seen
    stop = seen
    if resumed.own_forwards:
        stop = total - 1
    elif cache.binding.rope is not None and cache.binding.rope.switch_before(total + new) > seen:
        stop = total - 1  # else `generate` would drop the cache, or mix frequencies
    elif restarts(model) and (seen > 0 or chunk < total):
        stop = total - 1  # token by token
    elif per_chunk:
        stop = [seen, *pieces.piece_ends(seen, total, chunk)][-2]
    elif chunk < total - seen:
        stop = total - chunk
    elif rows > 1 and seen > 0:
        # Rows are multiplied after reading all but the last token, so that this is read once.
        stop = total - 1
    return stop


def check_graph(
    model: PreTrainedModel, cache: CompressedCache, how: How, settings: Any, options: dict[str, Any]
) -> None:
    """Raises KvfoldError or UnsupportedModel for steps that no graph can make."""
    if how.compile and how.capture:
        raise KvfoldError("compile=True and capture=True are two kinds of graphs: choose one")
    option = "compile=True" if how.compile else "capture=True"
    if is_assisted(options):
        raise KvfoldError(f"{option} does not go with assisted decoding: choose one of them")
    if how.compile:
        check_steps(model, cache, option, settings)
    else:
        check_captured(model, cache, settings)


def check_compress(when: str) -> None:
    """Raises KvfoldError for a time of compression that there is not."""
    if when not in get_args(Compress):
        raise KvfoldError(f'compress is "at_end" or "per_chunk", not {when!r}')


def is_assisted(options: dict[str, Any]) -> bool:
    """True if an option of the call asks for assisted decoding."""
    return any(options.get(name) for name in ASSISTED)


def settings_of(model: PreTrainedModel, options: dict[str, Any]) -> Any:
    """The generation settings that this call will run under; the model's where none is given."""
    base = options.get("generation_config") or model.generation_config
    given = {name: value for name, value in base.to_dict().items() if value is not None}
    named = {name: value for name, value in options.items() if name in base.to_dict()}
    return type(base).from_dict(model.generation_config.to_dict() | given | named)


def new_tokens(settings: Any, total: int) -> int:
    """Most tokens that `generate` may produce after a prompt of `total`."""
    if settings.max_new_tokens is not None:
        return int(settings.max_new_tokens)
    return NEW_TOKENS if settings.max_length is None else max(0, int(settings.max_length) - total)
