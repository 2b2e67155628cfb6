# SPDX-License-Identifier: Apache-2.0
"""An agent's conversation in one compressed cache: turns are appended, messages edited by id.

Each token is read once. Entries stay as they are until a turn would go beyond the budget by more
than `SLACK`: its end compresses everything to the budget. Edits are queued until they free `QUEUED`
of the tokens, as each moves all that stands behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.edits import check_editable, check_replaceable, dropped, holds
from kvfold.cache.edits import replaced as spliced
from kvfold.cache.stats import Stats
from kvfold.contexts.answer import AnswerStream, Reply, end_tokens
from kvfold.contexts.chat import check_one_answer
from kvfold.contexts.context import Context, compress
from kvfold.contexts.files.format import SessionHeader, opened
from kvfold.contexts.files.read import load
from kvfold.errors import BudgetError, ContextFileError, KvfoldError
from kvfold.generation.generate import read_turn
from kvfold.generation.length import check_length
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_tokens, stock_generate
from kvfold.hf.user_text import content, segment_ids, segments
from kvfold.methods.base import Method

# Shares: of the budget that turns may go beyond it, and of the tokens that queued edits may free.
SLACK, QUEUED = 0.25, 0.1

Role = Literal["user", "tool", "assistant"]


@dataclass(frozen=True)
class Message:
    """A message to append; without an `id`, the session numbers it ("m3" is its fourth)."""

    text: str
    role: Literal["user", "tool"] = "user"
    id: str | None = None


@dataclass(frozen=True)
class Item:
    """A message of a session: tokens `start` to `stop`, those of the chat template left out."""

    id: str
    role: Role
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class SessionRecord:
    """What happened in a session so far.

    Args:
        items: its messages in order.
        queued: new texts of messages whose edit waits; empty for one that is dropped.
        numbered: messages that were ever appended.
        turns: questions that were answered.
        compactions: turns whose end compressed the cache.
    """

    items: tuple[Item, ...] = ()
    queued: dict[str, str] = field(default_factory=dict)
    numbered: int = 0
    turns: int = 0
    compactions: int = 0

    def item(self, name: str) -> Item:
        """The message of an id; raises KvfoldError if there is none."""
        found = next((each for each in self.items if each.id == name), None)
        if found is None:
            raise KvfoldError(f"there is no message {name!r} in this session")
        return found


@dataclass(frozen=True)
class Turn:
    """A turn on its way: `cache` has read a part of `ids [1, N]`, all tokens up to the answer."""

    cache: CompressedCache
    ids: Tensor
    items: tuple[Item, ...]
    compacts: bool


class Session:
    """A conversation that begins with a `context`, whose cache is its own from now on.

    Answers come on top of the budget until the next turn. One thread uses a session at a time;
    after any error it is as before.

    Raises KvfoldError for methods with forwards of their own, and for caches that cannot be edited
    (see `kvfold.cache.edits.Edits`); BudgetError for a budget that is no number of tokens.
    """

    def __init__(self, context: Context, record: SessionRecord | None = None) -> None:
        cache = context.cache
        stages = cache.method.stages()
        if stages.needs.reconstruction is not None or stages.token_pruning is not None:
            raise KvfoldError(
                f"{cache.method} reads a text by forwards of its own, which turns that are "
                "appended do not have: choose SnapKV, KeyDiff or another method of one forward"
            )
        if cache.budget is None or cache.budget.kind != "tokens":
            raise BudgetError(
                f"a session is bounded by a number of tokens, not by {cache.budget}: write an int"
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

    def save(self, path: str | Path) -> None:
        """Writes a file for `load_session`, also a context's; see `contexts/files/write.py`."""
        from kvfold.contexts.files.write import save

        save(self.context, path, SessionHeader.model_validate(asdict(self.record)))

    # --- turns ------------------------------------------------------------------------------

    def ask(
        self,
        *messages: Message | str,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> Reply:
        """Appends a turn of `messages` and the model's answer to it, greedy by default.

        `stop` are strings that end the answer, `options` further ones of `model.generate`. Raises
        as `open` does.
        """
        given = [each if isinstance(each, Message) else Message(each) for each in messages]
        check_one_answer(options)
        turn = self.open(given)
        criteria = options.pop("stopping_criteria", None) or []
        said = AnswerStream(self.context.tokenizer, turn.ids.shape[1], stop, _discard, Event())
        with turn.cache.frozen():
            out = stock_generate(
                self.context.model,
                input_ids=turn.ids,
                attention_mask=torch.ones_like(turn.ids),
                past_key_values=turn.cache,
                **({"do_sample": False} | options),
                max_new_tokens=max_new_tokens,
                stopping_criteria=[*criteria, said],
            )
        generated: list[int] = out[0, turn.ids.shape[1] :].tolist()
        self.close(turn, said.finish(generated))
        return said.reply(generated, end_tokens(self.context.model))

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
        Generate inside `cache.frozen()`. Raises KvfoldError for no messages, an id that is taken, a
        second turn if the chat template has none, and a session too long for the model.
        """
        ids, items = self._read_as(messages, special_tokens)
        check_length(self.context.model, ids.shape[1], allow_longer)
        cache = copy.deepcopy(self.cache, {id(self.context.tokenizer): self.context.tokenizer})
        compacts = self.crowded(ids.shape[1] - self.ids.shape[1])
        if compacts:
            # Generation needs a token to read: the last one comes on top.
            ended = ids[:, :-1]
            length = ended.shape[1]
            read_turn(self.context.model, cache, ended, None, length, prefill_chunk or length)
        return Turn(cache, ids, items, compacts)

    @torch.no_grad()
    def close(self, turn: Turn, answer: Sequence[int]) -> None:
        """Appends a turn and its `answer`, of which the cache has read all tokens but the last."""
        model, ends = self.context.model, end_tokens(self.context.model)
        # The template writes the end token, before the next turn.
        said = list(answer[:-1] if answer and answer[-1] in ends else answer)
        ids = torch.cat([turn.ids, turn.ids.new_tensor([said])], 1) if said else turn.ids
        cache, stop = turn.cache, ids.shape[1]
        with cache.frozen():
            if cache.get_seq_length() > stop:
                cache.crop(stop - cache.get_seq_length())
            elif cache.get_seq_length() < stop:
                read_tokens(model, ids[:, cache.get_seq_length() :], cache, None)
        before = self.record
        number = before.numbered + len(turn.items)
        answered = Item(f"m{number}", "assistant", turn.ids.shape[1], stop)
        self.context = replace(self.context, cache=cache, ids=ids)
        self.record = replace(
            before,
            items=(*before.items, *turn.items, answered),
            numbered=number + 1,
            turns=before.turns + 1,
            compactions=before.compactions + turn.compacts,
        )

    # --- edits ------------------------------------------------------------------------------

    def drop(self, *names: str, now: bool = False) -> None:
        """Drops messages; their templates stay, as empty messages. Otherwise as `edit`."""
        self.edit(dict.fromkeys(names, ""), now)

    def shorten(self, name: str, text: str, now: bool = False) -> None:
        """Replaces a message by a `text`; KvfoldError for an empty one, and otherwise as `edit`."""
        if not text:
            raise KvfoldError("the new text is empty: drop the message")
        self.edit({name: text}, now)

    def edit(self, texts: Mapping[str, str], now: bool = False) -> None:
        """Gives messages new texts, which are read, by id; an empty one drops its message.

        The edits wait until the queue frees enough, unless `now`. A message whose entries were all
        evicted is dropped already, and its tokens keep their places. Raises KvfoldError for an id
        that there is none of, for a new text of a message that was evicted, and as
        `CompressedCache.replace`.
        """
        record = self.record
        for name, text in texts.items():
            item = record.item(name)
            if text:
                check_replaceable(self.cache)
                self._check_held(item)
        queued = record.queued | dict(texts)
        edited = [each for each in record.items if each.id in queued]
        if now or sum(each.tokens for each in edited) > QUEUED * self.ids.shape[1]:
            self._apply(edited, queued)
        else:
            self.record = replace(record, queued=queued)

    def _apply(self, edited: Sequence[Item], texts: dict[str, str]) -> None:
        """Edits items in one pass, the latest first: those before it stay where they are."""
        context, items = self.context, {each.id: each for each in self.record.items}
        for item in reversed(edited):
            text, held = texts[item.id], holds(context.cache, (item.start, item.stop))
            if not text:
                del items[item.id]
            if held:
                new = self._tensor(self._ids_of(text)) if text else self.ids[:, :0]
                context = _spliced(context, item, new)
                moved = new.shape[1] - item.tokens
                items = {name: _moved(each, item, moved) for name, each in items.items()}
        self.context = context
        self.record = replace(self.record, items=tuple(items.values()), queued={})

    def _check_held(self, item: Item) -> None:
        if not holds(self.cache, (item.start, item.stop)):
            raise KvfoldError(
                f"nothing is left of message {item.id!r}, whose entries were evicted: append the "
                "text as a message of its own"
            )

    # --- tokens -----------------------------------------------------------------------------

    def _read_as(
        self, messages: Sequence[Message], special_tokens: bool
    ) -> tuple[Tensor, tuple[Item, ...]]:
        """Token ids `[1, N]` up to the answer to `messages`, and these as items."""
        if not messages:
            raise KvfoldError("a turn has at least one message")
        frame, names = self.context.frame, {each.id for each in self.record.items}
        opening = frame.between if self.record.turns else frame.separator
        if opening is None:
            raise KvfoldError("the tokenizer's chat template has no second turn")
        ids, items = self.ids[0].tolist(), []
        for index, message in enumerate(messages):
            ids += self._ids_of(frame.separator if index else opening, True)
            text = self._ids_of(message.text, special_tokens)
            name = message.id or f"m{self.record.numbered + index}"
            if name in names:
                raise KvfoldError(f"the session has a message {name!r} already")
            names.add(name)
            items.append(Item(name, message.role, len(ids), len(ids) + len(text)))
            ids += text
        return self._tensor(ids + self._ids_of(frame.after, True)), tuple(items)

    def _ids_of(self, text: str, special_tokens: bool = False) -> list[int]:
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


def _spliced(context: Context, item: Item, new: Tensor) -> Context:
    """A context with tokens `new [1, m]` in place of an item's."""
    span = (item.start, item.stop)
    cache = spliced(context.cache, span, new) if new.numel() else dropped(context.cache, span)
    ids = torch.cat([context.ids[:, : item.start], new, context.ids[:, item.stop :]], 1)
    return replace(context, cache=cache, ids=ids)


def _moved(item: Item, edited: Item, by: int) -> Item:
    """An item after another one, or itself, became `by` tokens longer."""
    start = item.start if item.start <= edited.start else item.start + by
    return replace(item, start=start, stop=item.stop if item.stop < edited.stop else item.stop + by)


def _discard(piece: str) -> None:
    """Sink for pieces of an answer that is not streamed."""


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


def load_session(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Session:
    """The session saved at `path`, which goes on where it was.

    Raises ContextFileError for a file that is no session's, and as `kvfold.load`.
    """
    with opened(path) as file:
        saved = file.header.session
    if saved is None:
        raise ContextFileError(f"{path} holds a context, and no session: load it with kvfold.load")
    items = tuple(Item(**dict(each)) for each in saved.items)
    record = SessionRecord(**dict(saved) | {"items": items})
    return Session(load(path, model, tokenizer), record)
