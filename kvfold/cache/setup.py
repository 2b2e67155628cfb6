# SPDX-License-Identifier: Apache-2.0
"""Construction of a cache: checks, the model's preparation, and its layers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention import function as function  # registers the attention function
from kvfold.budget import Budget
from kvfold.cache import model_trial
from kvfold.cache.barrier import Barrier
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.phase import Phase
from kvfold.cache.plan import Plan
from kvfold.cache.spans import Span
from kvfold.cache.state import LayerState
from kvfold.cache.tensor_parallel import Ranks
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.fitted.fits import Fits
from kvfold.fitted.sources import with_parts
from kvfold.hf.arguments import checked_arguments as checked_arguments
from kvfold.hf.attention import check_prompts, disable, enable, is_enabled
from kvfold.hf.decoder_layers import check_structure
from kvfold.hf.forward_hooks import preparing, watch
from kvfold.hf.models import caches_latents, shares_entries, text_config
from kvfold.hf.output_projection import OutputProjection
from kvfold.hf.rotation import Rotation
from kvfold.hf.stock_layers import has_recurrent, is_compressible, stock_layers
from kvfold.hf.versions import PARALLEL_FROM
from kvfold.methods.base import Method, Stages
from kvfold.observers.of_layer import Observers
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed


@dataclass(frozen=True)
class Shared:
    """Objects that all layers of a cache share."""

    phase: Phase
    barrier: Barrier[LayerState]
    binding: ModelBinding


def checked_seed(seed: Any) -> int:
    """The seed, a whole number of Python, numpy or torch; KvfoldError for anything else."""
    try:
        return operator.index(seed)
    except TypeError:
        raise KvfoldError(f"seed is a whole number, not {seed!r}") from None


def check_tokenizer(method: Method, tokenizer: Any) -> None:
    """Raises KvfoldError for a method that repeats the context in words, without a tokenizer."""
    if ContextReconstruction in method.stages().needs and tokenizer is None:
        raise KvfoldError(
            f"{method} lets the model repeat the text, in words of its chat template: "
            "give the cache tokenizer=, and use kvfold.compress or kvfold.generate"
        )


def ranks_of(model: PreTrainedModel) -> Ranks:
    """The model's KV heads that this process holds.

    Raises UnsupportedModel if ranks would not hold equally many heads of their own.
    """
    size, name = getattr(model, "tp_size", None) or 1, type(model).__name__
    if size == 1:
        return Ranks()
    heads = getattr(text_config(model), "num_key_value_heads", None)
    reason = None
    if Version(transformers.__version__) < PARALLEL_FROM:
        reason = f"is shared out by transformers before {PARALLEL_FROM}"
    elif dist.get_world_size() != size:
        reason = "is not shared out among all processes"
    elif caches_latents(model):
        reason = "caches latents, which every rank holds whole"
    elif has_recurrent(stock_layers(model)):
        reason = "has recurrent layers, whose states have no KV heads"
    elif not isinstance(heads, int):
        reason = "does not say how many KV heads it has"
    elif heads % size:
        reason = f"has {heads} KV heads, not a multiple of {size}"
    if reason is not None:
        raise UnsupportedModel(
            f"{name} {reason}: {size} ranks cannot share it by its heads, load it in one process"
        )
    assert isinstance(heads, int)
    return Ranks(dist.get_rank(), size, heads)


def stages_of(method: Method, protect: tuple[Span, ...], ranks: Ranks, fits: Fits) -> Stages:
    """The method's stages with protected spans and parts of heads, over the heads of all ranks.

    Raises KvfoldError for a method that ranks cannot share.
    """
    stages = with_parts(method.stages(), fits.curve)
    forced = replace(stages.forced, spans=stages.forced.spans + protect)
    ranks.check_method(method)
    return ranks.joining(replace(stages, forced=forced, method=str(method)))


def prepare(model: PreTrainedModel, make_trial: Callable[[], Cache]) -> None:
    """Routes the model's attention through kvfold, and runs a trial if this is its first cache.

    Raises UnsupportedModel if its answers would be wrong; the model is then unchanged.
    """
    with preparing:
        known = is_enabled(model)
        enable(model)
        watch(model)
        check_prompts(model)
        if not model_trial.untried(model):
            return
        try:
            model_trial.run(model, make_trial())
        except BaseException:
            if not known:
                disable(model)
            raise


def put_compressed_layers(
    layers: list[Any],
    model: PreTrainedModel,
    stages: Stages,
    fits: Fits,
    budget: Budget | None,
    seed: int,
    ranks: Ranks,
    shared: Shared,
    keep_scores: bool,
) -> None:
    """Replaces the stock `layers` that attend to their whole past; the others stay.

    Raises UnsupportedModel as `Plan.by` does, and as `check_structure` for on-policy queries.
    """
    fits.check_entries(model_trial.entry_shapes(model) or ())
    shares, latents = shares_entries(model), caches_latents(model)
    if stages.refit is not None and (shares or latents):
        how = "shares entries among layers" if shares else "caches latents"
        raise UnsupportedModel(
            f"{type(model).__name__} {how}, so that its entries cannot be fitted to the queries of "
            "one layer: leave match out"
        )
    references = stages.needs.get(ReferencesNeed)
    if references is not None and references.on_policy:
        check_structure(model)
    own = [i for i, layer in enumerate(layers) if is_compressible(layer)]
    for place, index in enumerate(own):
        of_model = Rotation(model, index), OutputProjection(model, index), shares, latents
        plan = Plan(stages, budget, place, len(own), seed, *of_model, ranks, keep_scores)
        plan = plan.by(stages)
        fitted = fits.of_layer(place, ranks.own_heads)
        observers = Observers.of(stages.needs, fitted, stages.interval)
        state = LayerState(plan, shared.phase, shared.barrier, observers)
        layers[index] = CompressedLayer(state, shared.binding)
