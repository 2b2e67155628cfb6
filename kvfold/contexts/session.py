# SPDX-License-Identifier: Apache-2.0
"""An agent's conversation in one compressed cache: turns are appended, messages edited by id.

Each token is read once. Entries stay as they are until a turn would go beyond the budget by more
than `SLACK`: its end compresses everything to the budget. Drops are queued until they free `QUEUED`
of the tokens, as each moves all that stands behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.edits import check_editable, check_replaceable, dropped, holds
from kvfold.cache.edits import replaced as spliced
from kvfold.cache.stats import Stats
from kvfold.contexts.answer import AnswerStream, Reply, end_tokens, generate_answer, without_end
from kvfold.contexts.chat import check_one_answer, discard, stop_strings
from kvfold.contexts.context import Context, compress
from kvfold.contexts.files.format import opened
from kvfold.contexts.files.header import SessionHeader
from kvfold.contexts.files.read import read
from kvfold.contexts.session_record import Item, Message, SessionRecord, Turn
from kvfold.errors import BudgetError, ContextFileError, KvfoldError
from kvfold.generation.length import check_length
from kvfold.generation.reading import read_turn
from kvfold.hf.arguments import checked_arguments, count_of
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_tokens
from kvfold.hf.user_text import content, segment_ids, segments
from kvfold.methods.base import Method

# Shares: of the budget that turns may go beyond it, and of the tokens that queued drops may free.
SLACK, QUEUED = 0.25, 0.1


class Session:
    """A conversation that begins with a `context`, whose cache is its own from now on.

    Answers come on top of the budget until the next turn. One thread uses a session at a time;
    after any error it is as before.

    Raises KvfoldError for methods that have forwards of their own or keep more than their budget,
    for caches that cannot be edited (see `kvfold.cache.edits.Edits`), and for a context shorter
    than the sinks that a method moves; BudgetError for a budget that is not a number of tokens.
    """

    def __init__(self, context: Context, record: SessionRecord | None = None) -> None:
        if not isinstance(context, Context):
            raise KvfoldError(f"a session begins with a Context, not a {type(context).__name__}")
        cache = context.cache
        check_method(cache.method)
        if cache.budget is None or cache.budget.kind != "tokens":
            raise BudgetError(
                "a session is bounded by a number of tokens, and this cache has "
                f"{'no budget' if cache.budget is None else cache.budget}: choose a method with a "
                "budget, and write it as an int"
            )
        stages = cache.method.stages()
        sinks = stages.forced.sinks
        if stages.positions == "reindex" and context.ids.shape[1] < sinks:
            raise KvfoldError(
                f"{cache.method} moves the keys of the first {sinks} tokens, which cannot be "
                "edited: begin the session with a longer text"
            )
        context.check()
        check_editable(cache)
        self.context, self.record = context, record or SessionRecord()

    @property
    def cache(self) -> CompressedCache:
        """The cache of all that was read."""
        return self.context.cache

    @property
    def ids(self) -> Tensor:
        """Token ids `[1, N]` of all that was read."""
        return self.context.ids

    def stats(self) -> Stats:
        """Kept entries and bytes."""
        return self.context.stats()

    @checked_arguments
    def save(self, path: str | Path) -> None:
        """Writes a context file with the session, for `load_session`; errors as `Context.save`."""
        from kvfold.contexts.files.write import save

        save(self.context, path, SessionHeader.model_validate(asdict(self.record)))

    # --- turns ------------------------------------------------------------------------------

    @checked_arguments
    def ask(
        self,
        *messages: Message | str,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        allow_longer: bool = False,
        **options: Any,
    ) -> Reply:
        """Appends a turn of `messages` and the model's answer to it, greedy by default.

        `stop` are strings that end the answer, `options` further ones of `model.generate`. Raises
        as `open` does, and KvfoldError for options that ask for several answers.
        """
        given = [each if isinstance(each, Message) else Message(each) for each in messages]
        check_one_answer(self.context.model, options)
        strings = stop_strings(stop)
        turn = self.open(given, special_tokens=special_tokens, allow_longer=allow_longer)
        model, prompt = self.context.model, turn.ids.shape[1]
        said = AnswerStream(self.context.tokenizer, prompt, strings, discard, Event())
        options |= {"max_new_tokens": count_of("max_new_tokens", max_new_tokens)}
        with turn.cache.frozen():
            generated = generate_answer(model, turn.cache, turn.ids, said, options)
        self.close(turn, said.finish(generated))
        return said.reply(generated, end_tokens(model))

    @torch.no_grad()
    def open(
        self,
        messages: Sequence[Message],
        *,
        prefill_chunk: int | None = None,
        special_tokens: bool = False,
        allow_longer: bool = False,
    ) -> Turn:
        """A turn of `messages`, to generate an answer with; `close` appends it.

        The cache has read all but the turn's last token if it compacts, else nothing of the turn.
        Generate inside `cache.frozen()`. Raises KvfoldError for a turn without messages or tokens,
        an id that is taken, a second turn if the chat template has none, and a session too long for
        the model.
        """
        record, ids, answer = self._with(messages, special_tokens)
        cache = copy.deepcopy(self.cache)
        length, new = ids.shape[1], ids.shape[1] - self.ids.shape[1]
        if not new:
            raise KvfoldError("the turn has no tokens")
        check_length(self.context.model, length, allow_longer, length - new)
        if new > 1 and self.crowded(new):
            # Generation needs a token to read: the last one comes on top.
            read_turn(self.context.model, cache, ids[:, :-1], chunk=prefill_chunk)
            record = replace(record, compactions=record.compactions + 1)
        return Turn(cache, ids, record, answer)

    @torch.no_grad()
    def close(self, turn: Turn, answer: Sequence[int]) -> None:
        """Appends a turn and its `answer`, of which the cache has read all tokens but the last."""
        model, said = self.context.model, without_end(self.context.model, answer)
        ids = torch.cat([turn.ids, turn.ids.new_tensor([said])], 1) if said else turn.ids
        cache, stop = turn.cache, ids.shape[1]
        with cache.frozen():
            if cache.get_seq_length() > stop:
                cache.crop(stop - cache.get_seq_length())
            elif cache.get_seq_length() < stop:
                read_tokens(model, ids[:, cache.get_seq_length() :], cache, None)
        answered = Item(turn.answer, "assistant", turn.ids.shape[1], stop)
        self.context = replace(self.context, cache=cache, ids=ids, level=None)
        self.record = replace(
            turn.record, items=(*turn.record.items, answered), turns=turn.record.turns + 1
        )

    # --- edits ------------------------------------------------------------------------------

    def drop(self, *names: str, now: bool = False) -> None:
        """Drops messages; their templates stay, as empty messages.

        Drops wait until together they free a tenth of the tokens, unless `now`. A message whose
        entries were all evicted counts as dropped, and its tokens keep their positions. Raises
        KvfoldError for an unknown id.
        """
        self.edit(names, {}, now)

    def shorten(self, name: str, text: str, special_tokens: bool = False) -> None:
        """Replaces a message by a shorter `text`, which is read; waiting drops are done with it.

        Raises KvfoldError for an unknown id, for a text that is empty or longer than the message,
        for a message whose entries were evicted, and as `CompressedCache.replace`.
        """
        self.edit((), {self.record.item(name).id: text}, special_tokens=special_tokens)

    def edit(
        self,
        drop: Collection[str],
        shorten: Mapping[str, str],
        now: bool = False,
        special_tokens: bool = False,
    ) -> None:
        """Drops messages and shortens others, by id, in one pass; as `drop` and `shorten`.

        Raises KvfoldError for a message that is to be both, or whose drop waits already.
        """
        for name in drop:
            self.record.item(name)
        both = sorted({*drop, *self.record.queued} & set(shorten))
        if both:
            raise KvfoldError(f"message {both[0]!r} is dropped or shortened, not both")
        texts = {
            name: self._shorter(self.record.item(name), text, special_tokens)
            for name, text in shorten.items()
        }
        before = self.record
        self.record = replace(before, queued=tuple(dict.fromkeys([*before.queued, *drop])))
        waiting = sum(each.tokens for each in before.items if each.id in self.record.queued)
        if not (now or texts or waiting > QUEUED * self.ids.shape[1]):
            return
        try:
            self._apply(texts)
        except BaseException:
            self.record = before
            raise

    def _shorter(self, item: Item, text: str, special_tokens: bool) -> list[int]:
        """Token ids of the new text of a message; raises KvfoldError for one that cannot be."""
        check_replaceable(self.cache)
        ids = self._ids_of(text, special_tokens)
        if not 0 < len(ids) <= item.tokens:
            raise KvfoldError(
                f"message {item.id!r} has {item.tokens} tokens, and its new text {len(ids)}: drop "
                "it, and append a longer text as a message of its own"
            )
        if not holds(self.cache, item.span):
            raise KvfoldError(
                f"nothing is left of message {item.id!r}, whose entries were evicted: append the "
                "text as a message of its own"
            )
        return ids

    def _apply(self, texts: Mapping[str, list[int]]) -> None:
        """Does all edits in one pass: drops move entries once; then the latest text comes first."""
        context, record = self.context, self.record
        gone = [each for each in record.items if each.id in record.queued]
        items = {each.id: each for each in record.items if each not in gone}
        held = [each for each in gone if each.tokens and holds(context.cache, each.span)]
        if held:
            context = _without(context, held)
            for item in reversed(held):
                items = {name: _moved(each, item, -item.tokens) for name, each in items.items()}
        for name in reversed([each for each in items if each in texts]):
            item, new = items[name], self._tensor(texts[name])
            cache = spliced(context.cache, item.span, new)
            ids = torch.cat([context.ids[:, : item.start], new, context.ids[:, item.stop :]], 1)
            context = replace(context, cache=cache, ids=ids, level=None)
            moved = new.shape[1] - item.tokens
            items = {other: _moved(each, item, moved) for other, each in items.items()}
        self.context = context
        self.record = replace(record, items=tuple(items.values()), queued=())

    # --- tokens -----------------------------------------------------------------------------

    def _with(
        self, messages: Sequence[Message], special_tokens: bool
    ) -> tuple[SessionRecord, Tensor, str]:
        """The record with `messages`, token ids `[1, N]` up to the answer, and the answer's id."""
        Message.check(messages)
        frame, record = self.context.frame, self.record
        opening = frame.between if record.turns else frame.separator
        if opening is None:
            raise KvfoldError("the tokenizer's chat template has no second turn")
        names = {each.id for each in record.items}
        for given in (each.id for each in messages if each.id is not None):
            if given in names:
                raise KvfoldError(f"the session has a message {given!r} already")
            names.add(given)
        ids = self.ids[0].tolist()
        for index, message in enumerate(messages):
            ids += self._ids_of(frame.separator if index else opening, True)
            text = self._ids_of(message.text, special_tokens)
            name, number = (message.id, record.numbered) if message.id else record.name(names)
            names.add(name)
            item = Item(name, message.role, len(ids), len(ids) + len(text))
            record = replace(record, items=(*record.items, item), numbered=number)
            ids += text
        answer, number = record.name(names)
        whole = self._tensor(ids + self._ids_of(frame.after, True))
        return replace(record, numbered=number), whole, answer

    def _ids_of(self, text: str, special_tokens: bool) -> list[int]:
        """Token ids of a text that stands behind another one."""
        tokenizer = self.context.tokenizer
        parts = segments(tokenizer, content(text, special_tokens))
        return segment_ids(tokenizer, ["", *parts])

    def _tensor(self, ids: list[int]) -> Tensor:
        return self.ids.new_tensor([ids])

    # --- size -------------------------------------------------------------------------------

    def crowded(self, tokens: int) -> bool:
        """True if so many more tokens are beyond the budget by more than `SLACK`."""
        budget = self.cache.budget
        assert budget is not None
        return self.stats().mean_kept + tokens > budget.amount * (1 + SLACK)


def _without(context: Context, items: Sequence[Item]) -> Context:
    """A context without the tokens of items."""
    stay = torch.ones_like(context.ids[0], dtype=torch.bool)
    for item in items:
        stay[item.start : item.stop] = False
    cache = dropped(context.cache, *(item.span for item in items))
    return replace(context, cache=cache, ids=context.ids[:, stay], level=None)


def _moved(item: Item, edited: Item, by: int) -> Item:
    """An item after another one, or itself, became `by` tokens longer."""
    start = item.start if item.start <= edited.start else item.start + by
    return replace(item, start=start, stop=item.stop if item.stop < edited.stop else item.stop + by)


def check_method(method: Method) -> None:
    """Raises KvfoldError for a method that cannot hold a session to a budget."""
    stages = method.stages()
    if stages.runs_own_forwards:
        raise KvfoldError(
            f"{method} reads a text by forwards of its own, which turns that are appended do not "
            "have: choose SnapKV, KeyDiff or another method of one forward"
        )
    if stages.inexact or stages.keeps_prompt:
        reason = stages.inexact or "the end of a turn evicts nothing"
        raise KvfoldError(f"{method} does not hold a session to its budget: {reason}")


@checked_arguments
def begin_session(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    opening: str,
    method: Method | str = "snapkv",
    budget: Budget | int = 1024,
    *,
    prefill_chunk: int | None = None,
    special_tokens: bool = False,
    allow_longer: bool = False,
) -> Session:
    """A session whose first message begins with `opening`: its instructions, which stay whole.

    A compaction keeps `budget` entries per KV head, the opening's among them. Other arguments are
    those of `kvfold.compress`, whose errors are raised, and those of `Session`.
    """
    frame = PromptFrame.of(tokenizer)
    length = token_ids(tokenizer, frame.before, content(opening, special_tokens)).shape[1]
    context = compress(
        model,
        tokenizer,
        opening,
        method,
        budget,
        prefill_chunk=prefill_chunk,
        protect=[(0, length)],
        special_tokens=special_tokens,
        allow_longer=allow_longer,
    )
    return Session(context)


@checked_arguments
def load_session(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Session:
    """The session saved at `path`, which goes on where it was.

    Raises ContextFileError for the file of a context, and as `kvfold.load`.
    """
    with opened(path) as file:
        saved = file.header.session
        if saved is None:
            raise ContextFileError(
                f"{path} holds a context, and no session: load it with kvfold.load"
            )
        context = read(file, model, tokenizer)
    items = tuple(Item(**dict(each)) for each in saved.items)
    return Session(context, SessionRecord(**dict(saved) | {"items": items}))
