# SPDX-License-Identifier: Apache-2.0
"""`CompressedCache`: a transformers `Cache` whose layers keep a budget of entries."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedModel

from kvfold.attention import handshake
from kvfold.attention.padding import announce, forget_announced
from kvfold.cache import model_trial, setup
from kvfold.cache.barrier import Barrier
from kvfold.cache.bound import bounded
from kvfold.cache.byte_count import stats_of
from kvfold.cache.continuation import check_mask, check_plain_prompt, padding_rules
from kvfold.cache.copy_to_budget import take_over
from kvfold.cache.edits import dropped, moved, replaced, take_from
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.open_forward import OpenForward, evict_judged
from kvfold.cache.parts import CacheParts
from kvfold.cache.phase import Phase
from kvfold.cache.plan import checked_budget
from kvfold.cache.shrink import check_nested
from kvfold.cache.spans import Span, spans_of
from kvfold.cache.stats import Stats
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.fitted.fits import Fits
from kvfold.hf.forward_hooks import ToldOfForwards
from kvfold.hf.models import dropping_length
from kvfold.hf.stock_layers import (
    can_crop_stock,
    crop_stock,
    cut_windows,
    detach_layers,
    reset_layers,
    stock_layers,
    take_rows,
)
from kvfold.kernels.full_precision import any_cast
from kvfold.methods.base import Method, parse
from kvfold.methods.layer_budgets import Given
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.store.ragged import share_pairs


class CompressedCache(CacheParts, ToldOfForwards):
    """A KV cache that keeps the entries that `method` chooses, within `budget`.

    Args:
        model: the model that will use it; its attention is routed through kvfold.
        method: a `Method`, or a text such as "snapkv:window=16".
        budget: entries per layer and KV head (int), share of tokens (float), "2GiB", or a list
            of one number for each compressed layer.
        tokenizer: the model's, for methods that let it repeat the text (KVzip).
        protect: spans `(start, stop)` of positions that are never evicted; see `kvfold.span`.
        seed: fixes the choice of random methods.
        keep_scores: keep the scores of kept entries, for smaller budgets later (`cache/shrink.py`).
        every: generated tokens after which the cache is back at its size, "method + every".
        max_cache_tokens: most entries while answering, with rounds if needed (`cache/bound.py`).

    Raises BudgetError for a budget that is missing, superfluous, or below the forced entries;
    UnsupportedModel for a model whose answers would be wrong; KvfoldError for a bad method, and for
    `keep_scores`, `every` or `max_cache_tokens` of a method that cannot.

    Processes that share a model do the same at the same time, see `cache/tensor_parallel.py`.
    """

    @setup.checked_arguments
    def __init__(
        self,
        model: PreTrainedModel,
        method: Method | str,
        budget: Given = None,
        *,
        tokenizer: Any = None,
        protect: Sequence[tuple[int, int]] = (),
        seed: int = 0,
        keep_scores: bool = False,
        every: int | None = None,
        max_cache_tokens: int | None = None,
    ) -> None:
        self.method, budget = bounded(parse(method), budget, every, max_cache_tokens)
        seed = setup.checked_seed(seed)
        self.max_cache_tokens, self.seed = max_cache_tokens, seed
        if keep_scores:
            check_nested(self.method)
        self.protect = spans_of(protect)
        setup.check_tokenizer(self.method, tokenizer)
        self.ranks = setup.ranks_of(model)
        self.fits = Fits.of(self.method.stages(), model)
        stages = setup.stages_of(self.method, self.protect, self.ranks, self.fits)
        self.budget = checked_budget(self.method, budget, stages.forced.least)
        layers = stock_layers(model)
        trial = partial(CompressedCache, model, model_trial.METHOD, model_trial.BUDGET)
        setup.prepare(model, trial)
        self.phase, self.binding = Phase.of(stages.needs), ModelBinding(model, tokenizer)
        shared = setup.Shared(self.phase, Barrier(), self.binding)
        setup.put_compressed_layers(
            layers, model, stages, self.fits, self.budget, seed, self.ranks, shared, keep_scores
        )
        super().__init__(layers)
        self._generating, self.dropping_length = False, dropping_length(model)
        self.cannot_be_dropped = False  # True while kvfold.generate runs, which prevents dropping
        self.forward, self.reads_logits = OpenForward(), bool(self.phase.logs)

    @property
    def reconstruction(self) -> ContextReconstruction | None:
        """Reconstruction that is due when the first prefill ends; None if done or not needed."""
        read = any(state.evictions for state in self.states)
        return None if read else self.method.stages().needs.get(ContextReconstruction)

    @property
    def runs_own_forwards(self) -> bool:
        """True if the first prompt is still to be read and needs the method's own forwards."""
        pruned = self.method.stages().token_pruning is not None and self.get_seq_length() == 0
        return pruned or self.reconstruction is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys `[B, H, S, D]` and values `[B, H, S, Dv]`; returns those to attend to.

        Raises UnsupportedModel if attention never claimed the last ones.
        """
        layer = self.layers[layer_idx]
        if handshake.pending.layer is not None:  # unclaimed, or left by another cache
            self.binding.check_answered()
        if not isinstance(layer, CompressedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # Never part of a graph, in which the layer's attention would be lost.
        if is_dynamo_compiling():
            return self._update_outside_of_graphs(key_states, value_states, layer_idx)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.update(key_states, value_states, layer_idx)
        state = layer.state
        if state.plan.layer == 0:
            forget_announced()  # by a model whose masks are not kvfold's
            told = self.forward.begun is not None  # else of an inner model's forward
            if self.binding.adapted or not told:
                self.binding.check_model(step=told or key_states.shape[2] == 1)
            self.binding.asked(level=state.sequence.seen == self.states[-1].sequence.seen)
        store = layer.update if any_cast() or not layer.is_initialized else state.append
        keys, values = store(key_states, value_states)
        return handshake.hand_out(keys, values, layer_idx, layer), values

    _update_outside_of_graphs = torch.compiler.disable(update)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of columns that the next forward's mask covers, and the first of them.

        Raises UnsupportedModel if layers hold different numbers of tokens, and KvfoldError as
        `ModelBinding.check_length`; changes nothing.
        """
        columns = self.common_length() + query_length
        if self.binding.window is not None:
            self.binding.check_length(columns)
        announce(partial(padding_rules, self, query_length))
        if isinstance(self.layers[layer_idx], CompressedLayer):
            return columns, 0
        return super().get_mask_sizes(query_length, layer_idx)

    check_prompt = check_plain_prompt

    @torch.compiler.disable
    def forward_begins(self, ids: Tensor | None, mask: Tensor | None, new: int) -> None:
        """Raises KvfoldError as `OpenForward.begin`, `Phase.expect` and the binding's checks."""
        self.binding.check_forward(ids, self.states[0].plan.stages.positions)
        start = self.states[0].sequence.seen
        if self.binding.rope is not None:
            self.binding.check_rope(start, self.tokens_read, new)
        if self.reads_logits:  # before missing logits are named as what is wrong
            self.common_length()
            self.states[0].barrier.unjudged.take()  # of a forward that failed
        self.forward.begin(start, self.is_level)
        if mask is not None:
            check_mask(self, mask, new)
        if self.phase.reads_ids:
            self.phase.expect(ids, start)

    @torch.compiler.disable
    def forward_returned(self, ids: Tensor | None, logits: Tensor | None) -> None:
        """Closes the last forward, and notes its `ids [B, S]` and the `logits` that stages read.

        Layers that waited for these evict. Raises as `stored_nothing` and `Phase.note_read`.
        """
        begun, seen = self.forward.begun, self.states[0].sequence.seen
        if begun == seen:
            raise self.forward.stored_nothing()
        if torch.is_grad_enabled():
            detach_layers(self.other_layers().values())
        if begun is None or seen > begun + 1:
            cut_windows(self.other_layers().values())
        if ids is not None and begun is not None:
            self.phase.note_read(ids, begun, logits, self.tokens_read)
        if self.phase.reads_ids:
            self.phase.forget_incoming()
        self.forward.close()
        if self.reads_logits:
            evict_judged(self.states[0].barrier)

    def forward_failed(self, seen: int) -> None:
        """Notes that a forward that began at `seen` columns stored tokens and then failed."""
        self.forward.fail(seen)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stores one recurrent layer's convolution state."""
        self.forward.move_states()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stores one recurrent layer's state."""
        self.forward.move_states()
        return super().update_recurrent_state(*args, **kwargs)

    # --- prefills ---------------------------------------------------------------------------

    def to_budget(self, budget: Given, method: Method | str | None = None) -> CompressedCache:
        """A copy whose open prefill ends now, compressed to another budget, by `method` if given.

        This cache stays as it is. Raises KvfoldError outside the first prefill's `reading()` block,
        and for a method that needs what this cache's method does not observe.
        """
        return take_over(self, budget, self.method if method is None else parse(method))

    def activate_past_recording(self) -> None:
        """Called by assisted decoding, which crops tokens; KvfoldError unless frozen."""
        if not self.phase.frozen:
            raise KvfoldError(
                "assisted decoding takes rejected tokens back, from a frozen cache only: call "
                "kvfold.generate(..., cache=cache), which reads the prompt and then freezes it"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens.

        Raises KvfoldError, and changes nothing, if entries were evicted or encoded since. Models
        with recurrent layers, or with sliding windows that have slid, only go back to where a
        `frozen()` block began.
        """
        self.check_crop(tokens_to_remove)
        length = self.get_seq_length() + tokens_to_remove
        saved = self._saved_at(length)
        self.phase.crop(length)
        self.forward.go_back(saved is not None)
        for layer in self.compressed_layers:
            layer.crop(tokens_to_remove)
        for i, other in self.other_layers().items():
            if saved is None:
                crop_stock(other, tokens_to_remove)
            else:
                self.layers[i] = copy.deepcopy(saved[i])

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises KvfoldError if `crop` would."""
        for layer in self.compressed_layers:
            layer.check_crop(tokens_to_remove)
        if self._saved_at(self.get_seq_length() + tokens_to_remove) is None and not all(
            can_crop_stock(layer, tokens_to_remove) for layer in self.other_layers().values()
        ):
            raise KvfoldError(
                f"{self.binding.name} has sliding windows or recurrent layers, which have let go "
                "of older tokens: they only go back to where a `with cache.frozen():` block began"
            )

    def reset(self) -> None:
        """Empties the cache."""
        reset_layers(self.layers)
        self.phase.reset()
        self.states[0].barrier.reset()
        self.take(per_chunk=None, _before_freezing=None)
        self.begin_anew()
        self.binding.forget_reader()
        self.forward.close()
        self.binding.answered()

    @property
    def _is_user_defined(self) -> bool:
        return self._generating

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # transformers' generate sets this when it is handed a cache, before it may drop it.
        limit = None if self.cannot_be_dropped else self.dropping_length
        if value and limit is not None and self.get_seq_length() <= limit:
            raise UnsupportedModel(
                f"generate() of {self.binding.name} silently drops a cache once a text passes "
                f"{limit} tokens: use kvfold.generate(model, ..., cache=cache)"
            )
        self._generating = value

    # --- rows -------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`."""
        self._take_rows(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self._take_rows(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows in `indices`."""
        self._take_rows(torch.arange(self.rows)[indices.cpu()] if self.rows else indices)

    def _take_rows(self, rows: Tensor) -> None:
        saved = self._before_freezing[1].values() if self._before_freezing else ()
        take_rows([*self.layers, *saved], rows)
        self.phase.index(lambda x: x.index_select(0, rows.to(x.device)))
        share_pairs(state.store for state in self.states)

    # --- edits ------------------------------------------------------------------------------

    def drop(self, *spans: Span) -> None:
        """Removes spans, as they stand in the text now; later tokens move up, once for all spans.

        KvfoldError for none, and for spans that overlap; for any edit, see `cache/edits.py`.
        """
        take_from(self, dropped(self, *spans))

    def move(self, span: Span, to: int) -> None:
        """Puts a span before token `to`. KvfoldError for a batch with padding."""
        take_from(self, moved(self, span, to))

    def replace(self, span: Span, ids: Tensor) -> None:
        """Reads tokens `ids [B, m]` in place of a span. KvfoldError for a batch with padding.

        The new tokens attend to what stands before them, and come on top of the budget. Later
        tokens keep their entries. KvfoldError for ids that the model does not know, for more new
        tokens than `max_cache_tokens` has room for, and for methods that sum attention, or score by
        logits: those of later tokens after new ones are not known.
        """
        take_from(self, replaced(self, span, ids))

    def stats(self) -> Stats:
        """Entries and bytes stored now; prints in a few lines, `details()` layer by layer."""
        return stats_of(self)
