# SPDX-License-Identifier: Apache-2.0
"""Every registered method as tests use it: small windows, so that small budgets are legal."""

from __future__ import annotations

from dataclasses import fields

from transformers import PreTrainedModel

import kvfold
from kvfold.errors import IllegalComposition
from kvfold.methods.base import preset
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.when import Hold
from kvfold.observers.column_sums import ColumnSums
from kvfold.observers.fitted import EntryScorer, HeadNumbers
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.surprise import SurpriseNeed

SMALL = 20  # entries per KV head, of the 24 to 64 tokens that prompts have


def _spec(name: str) -> str:
    options = {field.name: getattr(preset(name), field.name) for field in fields(preset(name))}
    small = ["window=8"] if "window" in options else []
    small += ["skip_layers=none"] if options.get("skip_layers") else []
    small += ["spending=exact"] if options.get("spending") == "official" else []
    small += ["proxies=6"] if "proxies" in options else []
    small += ["chunk=8"] if name == "non_causal" else []
    small += ["chunk=8", "first=3", "last=2"] if name.startswith("compactor") else []
    small += ["lag=8", "sinks=4"] if "lag" in options else []
    small += ["prompt=counted"] if options.get("prompt") == "kept" else []
    small += ["recent=4"] if name == "scissorhands" else []
    small += ["size=4"] if name == "pages" else []
    small += ["group=8", "residual=8"] if name.startswith("kivi") else []
    small += ["residual=8", "sinks=2", "end_layers=0"] if name.startswith("turboquant") else []
    small += ["residual=8", "sinks=2", "read=0.2"] if name == "recall" else []
    small += ["queries=8", "recent=8"] if name.startswith("think") else []
    small += ["block=8"] if name.startswith("minicache") else []
    small += ["least=0.5", "least_context=8"] if name.startswith("pyramidinfer") else []
    return ":".join(filter(None, (name, ",".join(small))))


def holds(spec: str) -> bool:
    """Whether the method evicts at every step, so that decoding keeps its size."""
    return isinstance(kvfold.parse(spec).stages().when, Hold)


def sums_columns(spec: str) -> bool:
    """Whether kvfold computes the attention itself, to add up its columns."""
    return kvfold.parse(spec).stages().needs.get(ColumnSums) is not None


def moves(spec: str) -> bool:
    """Whether kept keys are rotated to new positions."""
    return kvfold.parse(spec).stages().positions != "original"


def _stands_alone(name: str) -> bool:
    try:
        preset(name).stages()
    except IllegalComposition:
        return False
    return True


def composed(name: str) -> str:
    """A method's text, with another in front of one that adds to others."""
    scoring = "keydiff" if name == "recent" else "snapkv"  # SnapKV has a window of its own
    return name if _stands_alone(name) else f"{scoring} + {name}"


def merges(spec: str) -> bool:
    """Whether kept entries are changed by those that are evicted."""
    return kvfold.parse(spec).stages().merge is not None


def encodes(spec: str) -> bool:
    """Whether entries are stored otherwise than they came."""
    return kvfold.parse(spec).stages().encode is not None


def reads_logits(spec: str) -> bool:
    """Whether tokens are scored by the model's logits, so that entries leave after the forward."""
    return kvfold.parse(spec).stages().needs.get(SurpriseNeed) is not None


def is_uniform(spec: str) -> bool:
    """Whether all layers and heads keep the same number of entries."""
    stages = kvfold.parse(spec).stages()
    return stages.allocate is uniform and stages.heads is None


def needs_driver(spec: str) -> bool:
    """Whether a bare forward is refused, because the method runs forwards of its own."""
    stages = kvfold.parse(spec).stages()
    return stages.needs.get(ContextReconstruction) is not None or stages.token_pruning is not None


def of_one_model(name: str) -> bool:
    """Whether the method needs a file that was made for the model."""
    if not _stands_alone(name):
        return False
    stages = preset(name).stages()
    fitted = stages.needs.get(EntryScorer), stages.needs.get(HeadNumbers)
    files = *fitted, getattr(stages.allocate, "parts", None)
    return files != (None, None, None)


_ALONE = [name for name in kvfold.list_methods() if _stands_alone(name)]
NAMED = [_spec(name) for name in _ALONE if not of_one_model(name)]
METHODS = [spec for spec in NAMED if not needs_driver(spec)]
COMPRESSING = [spec for spec in METHODS if kvfold.parse(spec).takes_budget]
EVICTING = [spec for spec in COMPRESSING if not merges(spec)]
# With a budget that everything fits into, these are the full cache.
SPARING = ["full", *COMPRESSING]
HOLDING = [spec for spec in COMPRESSING if holds(spec)]
APPENDING = [spec for spec in COMPRESSING if not holds(spec)]
UNIFORM = [spec for spec in COMPRESSING if is_uniform(spec)]


def compressed(
    model: PreTrainedModel, spec: str, budget: float | str = SMALL, **options: object
) -> kvfold.CompressedCache:
    """A cache with `budget`, or without one for a method that takes none."""
    given = budget if kvfold.parse(spec).takes_budget else None
    return kvfold.CompressedCache(model, spec, given, **options)
