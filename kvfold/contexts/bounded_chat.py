# SPDX-License-Identifier: Apache-2.0
"""Chat over a context whose earlier turns are compressed to a budget of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import end_turn, fork_within
from kvfold.cache.stats import Stats
from kvfold.contexts.answer import AnswerStream
from kvfold.contexts.chat import Chat
from kvfold.contexts.document import CompressedDocument
from kvfold.errors import BudgetError, KvfoldError


class BoundedChat(Chat):
    """A chat whose own turns keep at most `budget` entries per KV head and layer.

    A turn is answered uncompressed. Once it is kept, it is read again as a whole, and all turns so
    far are compressed together: see `fork_within`. After an error they are read and compressed
    again, one after the other. The context's entries, which are shared, do not change. Positions
    keep counting, so the model's trained length bounds the conversation. Raises BudgetError for a
    budget that is not a number of tokens, or too small.
    """

    def __init__(self, context: CompressedDocument, budget: Budget | float | str) -> None:
        made = Budget.of(budget)
        if made.kind != "tokens":
            raise BudgetError(
                f"a chat's turns are bounded by a number of tokens, not by {made}: write an int"
            )
        self.budget = int(made.amount)
        self._ends: list[int] = []  # tokens at which the turns so far were compressed
        super().__init__(context)

    def stats(self) -> Stats:
        """Kept entries and bytes, as of `Chat`; after an error turns are read again before."""
        self._catch_up()
        return super().stats()

    def _new_reader(self) -> CompressedCache:
        return fork_within(self.context.cache, self.budget)

    def _generate_ids(
        self, asked: Tensor, answer: AnswerStream, options: dict[str, Any]
    ) -> list[int]:
        self._catch_up()
        reader = self.reader
        start = reader.get_seq_length()
        # A frozen cache can restore its sliding and recurrent layers to the start of the turn.
        with reader.frozen():
            try:
                return super()._generate_ids(asked, answer, options)
            finally:
                if reader.is_level():
                    reader.crop(start - reader.get_seq_length())

    def _catch_up(self) -> None:
        """Reads and compresses the turns again, one by one, into a reader made after an error."""
        try:
            for end in self._ends:
                if self.reader.get_seq_length() < end:
                    end_turn(self.context.model, self.reader, self.ids[:, :end])
        except BaseException:
            self.reader = self._new_reader()
            raise

    def _sync_reader(self, ids: Tensor) -> None:
        self._catch_up()
        excess = self.reader.get_seq_length() - ids.shape[1]
        if excess < 0 and ids is not self.ids:
            end_turn(self.context.model, self.reader, ids)
            self._ends.append(ids.shape[1])
        elif excess > 0:
            self._take_back(excess)
            self._ends = [*(end for end in self._ends if end < ids.shape[1]), ids.shape[1]]

    def _take_back(self, tokens: int) -> None:
        try:
            self.reader.crop(-tokens)
        except KvfoldError as refused:
            raise KvfoldError(
                "turns of a chat with a budget cannot be dropped once they are compressed with "
                "others: begin another chat of the context"
            ) from refused
