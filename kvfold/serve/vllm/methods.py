# SPDX-License-Identifier: Apache-2.0
"""Methods by which texts are compressed for vLLM: refused before a text comes, or levelled."""

from __future__ import annotations

from kvfold.contexts.levelled import level_of
from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.base import Method, Stages
from kvfold.methods.stages.select.one_set import Rule

LEVEL: Rule = "mass"  # where heads keep different numbers of entries, and no rule is named


def level_for(method: Method, asked: Rule | None = None, *, parts: bool = False) -> Rule | None:
    """The rule by which texts of `method` are levelled; None: they fit vLLM's pages as they are.

    `asked` is the rule that a user names. With `parts`, layers may keep different numbers of
    entries, but the heads of a layer may not. Raises KvfoldError for a method whose entries vLLM
    cannot hold, and for one that needs to be levelled and cannot be.
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
    if asked is None and is_even(stages, parts=parts):
        return None
    try:
        level_of(method, asked or LEVEL)
    except IllegalComposition as problem:
        why = (
            "" if asked else "keeps different numbers of entries, which vLLM's pages cannot hold; "
        )
        raise KvfoldError(f"{method} {why}cannot be levelled: {problem}") from None
    return asked or LEVEL


def is_even(stages: Stages, *, parts: bool) -> bool:
    """True if all KV heads keep equally many entries whatever their scores.

    Of all layers, or of each layer by itself with `parts`.
    """
    if isinstance(stages.shape, str):
        return True
    if stages.heads is not None or getattr(stages.allocate, "per_head", False):
        return False
    return parts or (stages.token_pruning is None and (stages.score is None or stages.uniform))
