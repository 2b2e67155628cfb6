# SPDX-License-Identifier: Apache-2.0
"""A pipeline of transformers that answers several questions about one compressed document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Pipeline, PreTrainedModel

from kvfold.contexts.context import compress
from kvfold.errors import KvfoldError
from kvfold.hf.arguments import checked_arguments
from kvfold.methods.base import Method
from kvfold.methods.layer_budgets import Given

# Arguments of `compress` alone, and of `compress` and `Context.ask`; all others are the latter's.
READING = (
    "method", "budget", "prefill_chunk", "compress", "protect", "seed", "keep_scores", "system",
)  # fmt: skip
BOTH = ("special_tokens", "allow_longer", "template")


class ContextPipeline(Pipeline):
    """`pipe(document, questions=[...])` gives `{"answers": [...], "stats": Stats}`.

    The document is read and compressed once, and each question reads it alone. A list of documents
    gives a list. `method`, `budget`, and options of `kvfold.compress` and `Context.ask`, are given
    when the pipeline is made or called. Raises KvfoldError without a question, for documents and
    questions that are no texts, for batches of documents, and what both raise.
    """

    def __call__(self, documents: Any, *, batch_size: int | None = None, **options: Any) -> Any:  # type: ignore[override]
        if (batch_size or self._batch_size or 1) > 1:
            raise KvfoldError("documents are read one by one: leave out batch_size=")
        return super().__call__(documents, **options)  # type: ignore[no-untyped-call]

    def _sanitize_parameters(
        self, question: str | None = None, questions: Sequence[str] | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if questions is not None and not isinstance(questions, list | tuple):
            raise KvfoldError("questions= takes a list of texts: for one text, give question=")
        reading = {name: options.pop(name) for name in READING if name in options}
        reading |= {name: options[name] for name in BOTH if name in options}
        asked = [*(questions or []), *([] if question is None else [question])]
        if not all(isinstance(each, str) and each for each in asked):
            raise KvfoldError(f"each question must be a text that is not empty, not {asked}")
        return reading, options | ({"asked": asked} if asked else {}), {}

    def preprocess(self, document: str, **reading: Any) -> dict[str, Any]:  # type: ignore[override]
        if not isinstance(document, str):
            raise KvfoldError(f"a document must be a text, not {type(document).__name__}")
        return {"document": document} | reading

    def _forward(  # type: ignore[override]
        self, inputs: dict[str, Any], asked: Sequence[str] = (), **options: Any
    ) -> dict[str, Any]:
        if not asked:
            raise KvfoldError("give the pipeline questions=[...], or a question=")
        tokenizer: Any = self.tokenizer
        context = compress(self.model, tokenizer, **inputs)
        return {
            "answers": [context.ask(question, **options) for question in asked],
            "stats": context.stats(),
        }

    def postprocess(self, outputs: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return outputs


@checked_arguments
def pipeline(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    method: Method | str | None = None,
    budget: Given = None,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> ContextPipeline:
    """A `ContextPipeline`; arguments hold for calls that do not say otherwise."""
    named: dict[str, Any] = {"method": method, "budget": budget}
    named |= {"system": system, "template": template}
    chosen = {name: value for name, value in named.items() if value is not None}
    return ContextPipeline(model=model, tokenizer=tokenizer, **chosen, **options)
