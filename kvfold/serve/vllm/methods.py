# SPDX-License-Identifier: Apache-2.0
"""Methods by which texts are compressed for vLLM, so that its pages hold what heads keep."""

from __future__ import annotations

from typing import Any

from kvfold.contexts.levelled import level_of
from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.base import Method, Stages, with_part
from kvfold.methods.pages import Pages
from kvfold.methods.stages.select.one_set import Rule
from kvfold.serve.vllm.evictions.asked import AskedEviction
from kvfold.serve.vllm.export import Paged

LEVEL: Rule = "mass"  # without pages of single heads, where no rule is named


def fitting(method: Method, asked: Rule | None, paged: Paged | None) -> tuple[Method, Rule | None]:
    """`method` so that vLLM holds its texts, and the rule by which they are levelled.

    Heads that keep different numbers of entries get whole pages of `paged`; without it, or by the
    rule `asked`, they are levelled. Raises KvfoldError for a method whose entries vLLM cannot hold,
    and for one that needs pages or levels and takes none.
    """
    stages = method.stages()
    if stages.encode is not None:
        raise KvfoldError(
            f"{method} stores entries encoded, and vLLM's pages hold raw entries: leave it out, "
            "and choose vLLM's kv_cache_dtype to quantize"
        )
    if stages.refit is not None and stages.refit.gives_bias:
        raise KvfoldError(
            f"{method} gives entries an attention bias, which vLLM's pages have no place for: "
            "choose match:bias=none,target=block"
        )
    if asked is None and isinstance(stages.shape, int):
        _check_pages(method, stages.shape, paged)
        return method, None
    if asked is None and is_even(stages):
        return method, None
    try:
        if asked is None and paged is not None:
            return with_part(method, Pages(paged.block)), None
        level_of(method, asked or LEVEL)
    except IllegalComposition as problem:
        why = "" if asked else "keeps different numbers of entries, which do not fill pages; "
        raise KvfoldError(f"{method} {why}cannot be changed so: {problem}") from None
    return method, asked or LEVEL


def _check_pages(method: Method, size: int, paged: Paged | None) -> None:
    """Raises KvfoldError for pages of a method that are not vLLM's."""
    if paged is None:
        raise KvfoldError(
            f"{method} fills pages of single heads, which this vLLM does not have: take --level"
        )
    if size % paged.block:
        raise KvfoldError(
            f"{method} fills pages of {size} entries, and vLLM's are of {paged.block}: "
            f"take pages:size={paged.block}"
        )


def is_even(stages: Stages) -> bool:
    """True if all KV heads keep equally many entries whatever their scores."""
    if stages.shape is not None:
        return not isinstance(stages.shape, int)
    if stages.heads is not None or getattr(stages.allocate, "per_head", False):
        return False
    return stages.token_pruning is None and (stages.score is None or stages.uniform)


def evicting(
    method: str, budget: str | None, every: int | None, paged: Paged | None
) -> tuple[dict[str, Any] | None, str]:
    """Parameters of what `method` evicts from all prompts inside vLLM, and a line that says so.

    None: prompts stay whole, as the line says. Raises KvfoldError then if `every` is given.
    """
    given: dict[str, Any] = {"method": method}
    if budget is not None:
        given["budget"] = budget
    if every is not None:
        given["every"] = every
    try:
        AskedEviction.within(given, paged)
    except KvfoldError as problem:
        if every is not None:
            raise
        return None, f"prompts stay whole: {problem}"
    again = "" if every is None else f", again after each {every} tokens"
    to = "" if budget is None else f" to {budget}"
    return given, f"prompts are evicted from once they are read, by {method}{to}{again}"
