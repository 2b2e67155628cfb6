# SPDX-License-Identifier: Apache-2.0
"""The truncation baseline ("cut"): a full cache on a context truncated to the budget."""

from __future__ import annotations

from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.eval.run.cell import FULL, EvalCell
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome
from kvfold.generation.reading import read_turn


def context_room(model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell, aware: bool) -> int:
    """Context tokens that fit into the cell's budget; if `aware`, next to the question's tokens."""
    assert cell.budget is not None
    asked = prompt.tokens_after()[0] if aware else 0
    budget = Budget.of(cell.budget)
    if budget.kind == "bytes":
        cache = CompressedCache(model, FULL)
        read_turn(model, cache, prompt.ids[:, :1].to(model.device))
        return int(budget.amount) // cache.stats().nbytes_full - asked
    return budget.per_layer(prompt.ids.shape[1] + asked, 1, 1, 1, 1) - asked


def as_whole_context(
    whole: SamplePrompt, shorter: SamplePrompt, outcome: SampleOutcome
) -> SampleOutcome:
    """A full cache's outcome on the `shorter` prompt, with sizes relative to the `whole` one."""
    held, left_out = outcome.held, shorter.left_out - whole.left_out
    longer = (held.seen + left_out) / held.seen
    update = {
        "seen": held.seen + left_out,
        "kept": held.kept / longer,
        "kept_per_layer": tuple(kept / longer for kept in held.kept_per_layer),
        "nbytes_full": round(held.nbytes_full * longer),
    }
    update = {
        "held": held.model_copy(update=update),
        "tokens": whole.tokens,
        "left_out": whole.left_out,
    }
    return outcome.model_copy(update=update)
