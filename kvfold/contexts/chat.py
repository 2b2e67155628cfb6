# SPDX-License-Identifier: Apache-2.0
"""Chat over a context: turns in sequence, each reading the kept ones before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import fork
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.stats import Stats
from kvfold.contexts.answer import AnswerStream, Reply, end_tokens, generate_answer, without_end
from kvfold.contexts.document import CompressedDocument
from kvfold.errors import KvfoldError
from kvfold.generation.length import check_length
from kvfold.generation.request import settings_of
from kvfold.hf.arguments import checked_arguments, count_of
from kvfold.hf.chat_template import token_ids
from kvfold.hf.user_text import content

ONE_ANSWER = ("num_beams", "num_return_sequences")


class Chat:
    """Turns over one context, whose entries are shared with all other chats.

    `ids [1, N]` are the tokens of the document and of all kept turns. Chats of one context may
    answer at the same time, each in its own thread; one chat answers one question at a time.
    Raises KvfoldError if the context's cache has read anything else.
    """

    def __init__(self, context: CompressedDocument) -> None:
        context.check()
        self.context = context
        self.ids = context.ids
        self.reader = self._new_reader()
        self._before_turns: list[int] = []

    @property
    def turns(self) -> int:
        """Number of kept turns."""
        return len(self._before_turns)

    def ask(
        self,
        question: str,
        *,
        keep: bool = True,
        answer_prefix: str = "",
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        allow_longer: bool = False,
        **options: Any,
    ) -> str:
        """The model's answer to a question, stripped of white space; greedy by default.

        Args:
            question: the user's message.
            keep: later turns read this one.
            answer_prefix: words the answer starts with; not part of the returned text.
            max_new_tokens: tokens to generate at most.
            stop: strings that end the answer; not part of the returned text.
            special_tokens: parse special tokens spelled in the texts; else they stay text.
            allow_longer: read beyond the model's trained length. A document that is longer itself
                allows it, too.
            options: further options of `model.generate`, such as `do_sample`.

        Raises KvfoldError for options that ask for several answers, for a text that is too long,
        and for a second turn if the chat template has none. After any error the chat is as before.
        """
        return self.reply(
            question,
            keep=keep,
            answer_prefix=answer_prefix,
            max_new_tokens=max_new_tokens,
            stop=stop,
            special_tokens=special_tokens,
            allow_longer=allow_longer,
            **options,
        ).text.strip()

    @checked_arguments
    def reply(
        self,
        question: str,
        *,
        keep: bool = True,
        answer_prefix: str = "",
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        allow_longer: bool = False,
        **options: Any,
    ) -> Reply:
        """The answer with its white space, its tokens and why it ended; otherwise as `ask`."""
        options |= {"max_new_tokens": count_of("max_new_tokens", max_new_tokens)}
        asked = self.question_ids(question, answer_prefix, special_tokens)
        self._check_length(asked, allow_longer)
        kept = partial(self._turn_ids, question, answer_prefix, special_tokens) if keep else None
        return self._answer(asked, kept, stop_strings(stop), discard, Event(), options)

    def add(
        self, question: str, answer: str, *, answer_prefix: str = "", special_tokens: bool = False
    ) -> None:
        """Adds a kept turn with a given `answer`, as if the model had generated it.

        It is read with the next question. Raises KvfoldError as `ask` does for a second turn.
        """
        before = self.ids.shape[1]
        said = token_ids(self.context.tokenizer, content(answer, special_tokens))[0].tolist()
        turn = self._turn_ids(question, answer_prefix, special_tokens, said)
        self.ids = torch.cat([self.ids, turn], 1)
        self._before_turns.append(before)

    @checked_arguments
    def stream(
        self,
        question: str,
        *,
        keep: bool = True,
        answer_prefix: str = "",
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        allow_longer: bool = False,
        **options: Any,
    ) -> Iterator[str]:
        """Iterator over the answer's text in pieces, as they are generated; otherwise as `ask`.

        Generation starts with the first `next`, in a thread. Closing the iterator ends the answer;
        its turn is then not kept.
        """
        options |= {"max_new_tokens": count_of("max_new_tokens", max_new_tokens)}
        asked = self.question_ids(question, answer_prefix, special_tokens)
        self._check_length(asked, allow_longer)
        kept = partial(self._turn_ids, question, answer_prefix, special_tokens) if keep else None
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        cancelled = Event()
        # Modes of the caller's thread: the reader's tensors may be made in inference mode.
        inference = torch.is_inference_mode_enabled()
        device = asked.device.type
        dtype, cast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def work() -> None:
            try:
                with torch.inference_mode(inference), torch.autocast(device, dtype, cast):
                    self._answer(asked, kept, stop_strings(stop), pieces.put, cancelled, options)
            except BaseException as problem:
                pieces.put(problem)
            pieces.put(None)

        thread = Thread(target=work, name="kvfold answer", daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            cancelled.set()
            thread.join()

    def drop(self, turns: int = 1) -> None:
        """Drops the last `turns` kept turns; raises KvfoldError if there are fewer."""
        if not (isinstance(turns, int) and turns == 0):
            turns = count_of("turns", turns)
        if turns > self.turns:
            raise KvfoldError(f"{turns} turns cannot be dropped of {self.turns}")
        if turns:
            ids = self.ids[:, : self._before_turns[-turns]]
            self._sync_reader(ids)
            self.ids = ids
            del self._before_turns[-turns:]

    def stats(self) -> Stats:
        """Kept entries and bytes of the context together with the chat's turns."""
        return self.reader.stats()

    def _answer(
        self,
        asked: Tensor,
        kept: Callable[[list[int]], Tensor] | None,
        stop: Sequence[str],
        put: Callable[[str], Any],
        cancelled: Event,
        options: dict[str, Any],
    ) -> Reply:
        """The answer to the question's tokens `asked [1, n]`, streamed to `put`.

        `kept` gives the tokens of the turn as later ones read it; None: they do not.
        """
        check_one_answer(self.context.model, options)
        model, ids, start = self.context.model, self.ids, self.reader.get_seq_length()
        asked = torch.cat([ids, asked], 1)
        answer = AnswerStream(self.context.tokenizer, asked.shape[1], stop, put, cancelled)
        try:
            generated = self._generate_ids(asked, answer, options)
            tokens = answer.finish(generated)
            if kept is not None and not cancelled.is_set():
                ids = torch.cat([ids, kept(without_end(model, tokens))], 1)
                self._take_back_to(_alike(ids, asked, generated))
            self._sync_reader(ids)
        except BaseException:
            if self.reader.broke_off or self.reader.get_seq_length() != start:
                # Layers may hold different tokens: a new fork reads the turns again.
                self.reader = self._new_reader()
            raise
        if ids is not self.ids:
            self._before_turns.append(self.ids.shape[1])
            self.ids = ids
        return answer.reply(generated, end_tokens(model))

    def question_ids(
        self, question: str, answer_prefix: str, special_tokens: bool, earlier: bool = False
    ) -> Tensor:
        """Token ids `[1, n]` of a question and the answer's prefix, inside the chat template.

        `earlier`: as the template shows them before later turns.
        """
        frame = self.context.frame
        after = frame.answered if earlier and frame.answered is not None else frame.after
        opening = frame.between if self.turns else frame.separator
        if opening is None:
            raise KvfoldError("the tokenizer's chat template has no second turn: ask without keep")
        theirs = [content(text, special_tokens) for text in (question, answer_prefix)]
        pieces = opening, theirs[0], after, theirs[1]
        return token_ids(self.context.tokenizer, *pieces).to(self.ids.device)

    def _turn_ids(
        self, question: str, answer_prefix: str, special_tokens: bool, said: list[int]
    ) -> Tensor:
        """Token ids `[1, n]` of a turn with the answer `said`, as later turns read it.

        What the chat template leaves out of earlier answers, such as reasoning, is left out.
        """
        frame, tokenizer = self.context.frame, self.context.tokenizer
        whole = answer_prefix + str(tokenizer.decode(said, skip_special_tokens=False))
        shown = frame.earlier(tokenizer, whole)
        if shown != whole:
            return self.question_ids(question, shown, special_tokens, earlier=True)
        asked = self.question_ids(question, answer_prefix, special_tokens, earlier=True)
        return torch.cat([asked, asked.new_tensor([said])], 1) if said else asked

    def _check_length(self, asked: Tensor, allow_longer: bool) -> None:
        """Raises KvfoldError beyond the trained length, unless the document alone is beyond it."""
        tokens, document = self.ids.shape[1] + asked.shape[1], self.context.ids.shape[1]
        check_length(self.context.model, tokens, allow_longer, document)

    def _generate_ids(
        self, asked: Tensor, answer: AnswerStream, options: dict[str, Any]
    ) -> list[int]:
        """Generated tokens after `asked [1, N]`, all tokens of the conversation."""
        return generate_answer(self.context.model, self.reader, asked, answer, options)

    def _new_reader(self) -> CompressedCache:
        """A cache that reads the turns: a fork of the context's."""
        return fork(self.context.cache)

    def _take_back_to(self, tokens: int) -> None:
        """Removes tokens of the answer that later turns do not read, from the first one on."""
        if self.reader.get_seq_length() > tokens:
            Chat._sync_reader(self, self.ids.new_empty(1, tokens))

    def _sync_reader(self, ids: Tensor) -> None:
        """Removes tokens beyond `ids [1, N]` from the reader; it reads missing ones later."""
        excess = self.reader.get_seq_length() - ids.shape[1]
        if excess <= 0:
            return
        if all(isinstance(layer, CompressedLayer) for layer in self.reader.layers):
            self.reader.crop(-excess)
        else:
            # Sliding and recurrent layers cannot be cropped: a new fork reads the kept turns again.
            self.reader = self._new_reader()


def _alike(ids: Tensor, asked: Tensor, generated: list[int]) -> int:
    """Number of the first tokens in which `ids [1, N]` equal a prompt and its answer."""
    read = torch.cat([asked, asked.new_tensor([generated])], 1)[0] if generated else asked[0]
    length = min(ids.shape[1], len(read))
    return int((ids[0, :length] == read[:length]).byte().cumprod(0).sum())


def check_one_answer(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Raises KvfoldError if options of `model.generate`, or its configuration, ask for several."""
    settings = settings_of(model, options)
    if any((getattr(settings, name) or 1) > 1 for name in ONE_ANSWER):
        raise KvfoldError(f"a question has one answer: set {' and '.join(ONE_ANSWER)} to 1")


def stop_strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    """Stop strings, of which a single one may be given by itself; KvfoldError for none of these."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not (isinstance(stop, Collection) and all(isinstance(each, str) for each in stop)):
        raise KvfoldError(f"stop takes a text or a list of texts, not {stop!r:.60}")
    return tuple(stop)


def discard(piece: str) -> None:
    """Sink for pieces of an answer that is not streamed."""
