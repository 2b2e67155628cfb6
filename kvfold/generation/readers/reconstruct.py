# SPDX-License-Identifier: Apache-2.0
"""Context reconstruction: forwards that let the model repeat a text, and score its entries.

KVzip, arXiv 2505.23416, section 3; snu-mllab/KVzip `model/wrapper.py`. KVzip+ and the demotion of
structural tokens: NVIDIA/kvpress `kvzip_press.py`, pull request 288.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.cache.phase import ReconstructionForward
from kvfold.cache.spans import opening_length
from kvfold.errors import KvfoldError
from kvfold.generation.head_scores import give_head_scores
from kvfold.generation.on_policy import OnPolicyReferences
from kvfold.generation.readers.plain import read_plainly
from kvfold.generation.structure import structural
from kvfold.hf.attention_inputs import inputs_noted
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.decoder_layers import DecoderLayers
from kvfold.hf.models import read_tokens
from kvfold.hf.user_text import Content
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed
from kvfold.reading import read_text


def read_and_reconstruct(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int,
) -> None:
    """As `read_plainly`, and `reconstruct` then, by which the prefill's end evicts."""
    read_plainly(model, cache, input_ids, mask, chunk)
    reconstruct(model, cache, input_ids, None if mask is None else mask[:, : input_ids.shape[1]])


def reconstruct(
    model: PreTrainedModel, cache: CompressedCache, input_ids: Tensor, mask: Tensor | None
) -> None:
    """Sets every layer's reconstruction scores: the maximum attention that each entry receives.

    `input_ids [B, N]` are all tokens of the cache, `mask [B, N]` is 0 at padding. A row's text
    begins after the chat template's opening, if the row has it; these tokens are kept and do not
    count in the budget. The cache's entries stay unchanged. With a file of head scores nothing is
    repeated, and with one of questions these are read instead.

    Raises KvfoldError for prompts without a text, for a row without the method's instruction, for
    a file of head scores that cannot be read or is another model's, and for a file without
    questions.
    """
    how, tokenizer = cache.reconstruction, cache.binding.tokenizer
    assert how is not None and tokenizer is not None
    frame = cache.binding.frame or PromptFrame.of(tokenizer).opened_with(how.instruction)
    opening = token_ids(tokenizer, frame.before)[0]
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    starts = (mask.cumsum(-1) == 0).sum(-1)
    rows = zip(input_ids, starts.tolist(), strict=True)
    lengths = [opening_length(row[start:], opening) for row, start in rows]
    prefix = torch.tensor(lengths, device=input_ids.device)
    if how.instruction and not bool(prefix.all()):
        raise KvfoldError(
            f"the prompt does not begin with {how.instruction.strip()!r}, as {cache.method} wants: "
            "use kvfold.compress, which puts it there, or leave out instruction=true"
        )
    cache.phase.keep_first(prefix)
    if how.head_scores is not None:
        give_head_scores(cache, how.head_scores)
        return
    texts = [
        row[kept.bool()][skip:]
        for row, kept, skip in zip(input_ids, mask, prefix.tolist(), strict=True)
    ]
    forwards: Iterable[_Forward] = (
        _repetitions(how, tokenizer, frame, texts)
        if how.questions is None
        else _questions(how.questions, tokenizer, frame, texts)
    )
    references = _on_policy(model, cache)
    for forward in forwards:
        _read_after(model, cache, mask, prefix, forward, references)
    cache.phase.refit_by(references)
    if how.demote:
        marks = [structural(tokenizer, text, how.demote_repeats) for text in texts]
        _demote(cache, marks, how.demote)


class _Forward(NamedTuple):
    """Tokens that each row reads after its text, and which entries of the text they score."""

    rows: list[Tensor]
    start: int  # first token of the text whose entry is scored
    counts: list[int]  # tokens from there on
    total: int | None = None  # tokens of all forwards, None: about as many as the prompt's


def _repetitions(
    how: ContextReconstruction,
    tokenizer: PreTrainedTokenizerBase,
    frame: PromptFrame,
    texts: list[Tensor],
) -> Iterator[_Forward]:
    """Each part of the texts, as the answer to a prompt that asks for it."""
    longest = max(map(len, texts))
    if not longest:
        raise KvfoldError("there is no text to compress behind the chat template's opening")
    for part in range(-(-longest // how.chunk)):
        requests = [_request(how, tokenizer, frame, text, part) for text in texts]
        counts = [len(repeated) for _, repeated in requests]
        rows = [torch.cat(request) for request in requests]
        yield _Forward(rows, how.chunk * part, counts)


def _request(
    how: ContextReconstruction,
    tokenizer: PreTrainedTokenizerBase,
    frame: PromptFrame,
    text: Tensor,
    part: int,
) -> tuple[Tensor, Tensor]:
    """Prompt that asks for one part of a text, and the part; both empty past the end."""
    chunk = text[part * how.chunk : (part + 1) * how.chunk]
    if len(chunk) == 0:
        return chunk, chunk
    asked = token_ids(tokenizer, how.first if part == 0 else how.later)[0].to(text.device)
    if part > 0:
        asked = torch.cat([asked, text[: part * how.chunk][-how.previous :]])
    return torch.cat([asked, token_ids(tokenizer, frame.after)[0].to(text.device)]), chunk


def _questions(
    file: str, tokenizer: PreTrainedTokenizerBase, frame: PromptFrame, texts: list[Tensor]
) -> list[_Forward]:
    """Each question of a file, as a user would ask it about the texts."""
    try:
        lines = read_text(file).splitlines()
    except (OSError, UnicodeError) as error:
        raise KvfoldError(f"cannot read {file} as questions: {error}") from None
    asked = [
        token_ids(tokenizer, frame.separator, Content(line.strip()), frame.after)[0]
        for line in lines
        if line.strip()
    ]
    if not asked:
        raise KvfoldError(f"{file} has no question: write one a line")
    counts, total = list(map(len, texts)), sum(map(len, asked))
    return [_Forward([ids.to(texts[0].device)] * len(texts), 0, counts, total) for ids in asked]


def _read_after(
    model: PreTrainedModel,
    cache: CompressedCache,
    mask: Tensor,
    prefix: Tensor,
    forward: _Forward,
    references: OnPolicyReferences | None,
) -> None:
    """One forward over all rows' new tokens, which are forgotten; their attention is noted.

    It is added to on-policy `references`, which run it again.
    """
    how = cache.reconstruction
    assert how is not None
    rows, start = forward.rows, forward.start
    longest = max(map(len, rows))
    new = mask.new_zeros(len(rows), longest)
    there = torch.zeros_like(new)
    for row, (into, valid) in zip(rows, zip(new, there, strict=True), strict=True):
        into[longest - len(row) :] = row
        valid[longest - len(row) :] = 1
    offsets = mask.cumsum(-1) - 1 - prefix[:, None]  # positions, from the text's first token on
    lengths = torch.tensor(forward.counts, device=mask.device)[:, None]
    scored = (offsets < 0) | ((offsets >= start) & (offsets < start + lengths))
    scored = torch.cat([scored & mask.bool(), there.bool()], 1)
    whole = torch.cat([mask, there], 1)
    padded = None if bool(whole.all()) else whole
    text = mask.shape[1]
    totals = [forward.total or of_row for of_row in mask.sum(-1).tolist()]
    repeating = ReconstructionForward(text, list(map(len, rows)), totals, scored, how.rms)
    cache.phase.repeat(repeating)
    try:
        with cache.frozen(), _weighing_queries(cache, repeating):
            read_tokens(model, new, cache, padded, at_once=True)
            cache.crop(-longest)
    finally:
        cache.phase.repeat(None)
    if references is not None:
        references.add(new, whole, totals)


def _on_policy(model: PreTrainedModel, cache: CompressedCache) -> OnPolicyReferences | None:
    """References that follow the refitted layers, if the method fits entries to such.

    Raises UnsupportedModel as `DecoderLayers`.
    """
    need = cache.method.stages().needs.get(ReferencesNeed)
    if need is None or not need.on_policy:
        return None
    return OnPolicyReferences(DecoderLayers(model), cache)


@contextmanager
def _weighing_queries(cache: CompressedCache, repeating: ReconstructionForward) -> Iterator[None]:
    """Sets the weights of a forward's queries to 1/‖h‖, h their layer's input (KVzip+ only)."""
    how = cache.reconstruction
    if how is None or not how.normalize:
        yield
        return

    def weigh(layer: int, hidden: Tensor) -> None:
        norms = hidden.detach().float().norm(dim=-1)
        repeating.row_weights[layer] = norms.clamp(min=torch.finfo(norms.dtype).tiny).reciprocal()

    with inputs_noted([state.plan.projection.attention for state in cache.states], weigh):
        yield


def _demote(cache: CompressedCache, marks: list[Tensor], factor: float) -> None:
    """Multiplies the scores of structural tokens; `marks [n]` are of each row's last columns."""
    for state in cache.states:
        scores = state.observers[ContextReconstruction].scores
        assert scores is not None
        for of_row, structure in zip(scores, marks, strict=True):
            demoted = of_row[:, len(of_row[0]) - len(structure) :]
            demoted[:, structure.to(scores.device)] *= factor
