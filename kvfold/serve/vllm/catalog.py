# SPDX-License-Identifier: Apache-2.0
"""Contexts that the proxy serves, and prompts of vLLM over them."""

from __future__ import annotations

from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from kvfold.contexts.files.format import opened, told_as_damage
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.hf.chat_template import PromptFrame
from kvfold.hf.identity import vocabulary
from kvfold.serve.errors import ApiError
from kvfold.serve.prompt_encoder import PromptEncoder
from kvfold.serve.request_schemas import ChatRequest, CompletionRequest
from kvfold.serve.vllm.export import UnevenContext
from kvfold.serve.vllm.placeholders import (
    CompatibilityCheck,
    ServedContext,
    ServedFolder,
    UnknownContext,
)
from kvfold.serve.vllm.request import ContextPrompt, check_vocabulary


class ContextCatalog:
    """Contexts of a folder; makes prompts of vLLM from requests over them.

    Raises ApiError for a context that is missing or cannot be served, and for a malformed request.
    With `reads`, texts of uneven contexts are read again when they are first asked.
    """

    def __init__(
        self,
        served_folder: ServedFolder,
        compatibility: CompatibilityCheck,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reads: bool = False,
    ) -> None:
        self.served_folder, self.compatibility = served_folder, compatibility
        self.reads = reads
        self.prompts = PromptEncoder(
            tokenizer, PromptFrame.of(tokenizer), compatibility.meta_model.config.vocab_size
        )
        self.vocabulary = vocabulary(tokenizer)
        self._altered: WeakKeyDictionary[ServedContext, ContextFileError | None]
        self._altered = WeakKeyDictionary()

    def chat(self, asking: ChatRequest) -> ContextPrompt:
        """The prompt of a conversation after a document."""
        served = self._requested(asking.context_id)
        turns = self.prompts.turns(asking.messages, served.frame, asking.template)
        return ContextPrompt(served, list(chain(*turns)))

    def complete(self, asking: CompletionRequest) -> ContextPrompt:
        """The prompt of a text, or of token ids, after a document."""
        served = self._requested(asking.context_id)
        return ContextPrompt(served, self.prompts.continuation(asking.text_or_tokens))

    def all(self) -> list[dict[str, Any]]:
        """All contexts: tokens, positions in vLLM, pages of heads, level; or why not."""
        return [self.about(name) for name in self.served_folder.ids()]

    def about(self, name: str) -> dict[str, Any]:
        """One context, as `all` lists it."""
        about: dict[str, Any] = {"id": name, "object": "context"}
        try:
            served = self._servable(name)
        except KvfoldError as problem:
            if self.reads and isinstance(problem, UnevenContext):
                return about | {"uneven": "its text is read again when it is first asked"}
            return about | {"refused": str(problem)}
        about |= {"tokens": served.seen, "kept": served.kept}
        if served.pages is not None:
            about |= {"pages": sum(map(sum, served.pages.of_layers))}
        return about if served.level is None else about | {"level": served.level.model_dump()}

    def is_read_first(self, name: str | None) -> bool:
        """True for a context whose text must be read again before it can be asked."""
        try:
            self.served_folder.get(name)
        except KvfoldError as problem:
            return self.reads and isinstance(problem, UnevenContext)
        return False

    def _requested(self, name: str | None) -> ServedContext:
        try:
            return self._servable(name)
        except UnknownContext as problem:
            message = f"there is no context {name!r}"
            raise ApiError(404, message, code="context_not_found", param="context_id") from problem
        except KvfoldError as problem:
            code = "context_refused"
            raise ApiError(400, str(problem), code=code, param="context_id") from problem

    def _servable(self, name: str | None) -> ServedContext:
        served = self.served_folder.get(name)
        check_vocabulary(served, self.vocabulary)
        self.compatibility.check(served)
        self._check_whole(served)
        return served

    def _check_whole(self, served: ServedContext) -> None:
        """Raises ContextFileError for altered tensors; reads each version of a file once.

        The connector in vLLM checks too, but its client would only learn that the request failed.
        """
        if served not in self._altered:
            self._altered[served] = self._altered_part(served)
        problem = self._altered[served]
        if problem is not None:
            raise problem

    def _altered_part(self, served: ServedContext) -> ContextFileError | None:
        try:
            with opened(self.served_folder.path(served.id)) as file, told_as_damage(file):
                file.check()
        except ContextFileError as problem:
            return problem
        return None
