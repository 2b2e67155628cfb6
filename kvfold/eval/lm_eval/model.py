# SPDX-License-Identifier: Apache-2.0
"""The model `kvfold` of lm-evaluation-harness: HFLM with compressed caches."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold import bundled
from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.stats import Stats
from kvfold.errors import KvfoldError
from kvfold.eval.lm_eval import score
from kvfold.generation.generate import generate
from kvfold.loading import device_or_usual
from kvfold.methods.base import Method, parse, spelled_out


class KeptShare(NamedTuple):
    """One cache: entries stored over entries seen, its bytes, and the bytes of a full cache."""

    fraction: float
    nbytes: int
    nbytes_full: int
    forced_over_budget: bool


@dataclass
class CacheRecord:
    """Statistics of the caches of one kind of request; a batch of prompts is one cache."""

    caches: list[KeptShare] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        """Adds the statistics of one cache."""
        over = stats.forced_over_budget
        self.caches.append(KeptShare(stats.kept_fraction, stats.nbytes, stats.nbytes_full, over))

    def summary(self) -> dict[str, Any]:
        """Number of caches, and their kept fraction and bytes; bytes are means.

        `whole` counts caches that evicted nothing; unless quantized or pruned, they answer like a
        full cache. `forced_over_budget` counts budgets without room beside sinks and window.
        """
        fractions, nbytes, full, over = zip(*self.caches, strict=True)
        count = len(self.caches)
        return {
            "caches": count,
            "whole": fractions.count(1.0),
            "forced_over_budget": sum(over),
            "kept_mean": sum(fractions) / count,
            "kept_least": min(fractions),
            "kept_most": max(fractions),
            "nbytes": sum(nbytes) / count,
            "nbytes_full": sum(full) / count,
            "bytes_ratio": sum(nbytes) / sum(full),
        }


@dataclass
class TruncationCount:
    """Requests truncated on the left, and the tokens cut off in all."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Adds a request that lost `tokens` tokens; 0 does not count."""
        self.requests += tokens > 0
        self.tokens += tokens


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as missing:
    raise KvfoldError(
        f"lm-evaluation-harness needs {missing.name}: pip install 'kvfold[lm_eval]'"
    ) from missing

# Options of HFLM that are refused: truncation would not be counted, mixed precision not applied.
REFUSED = {
    "truncation": "contexts are cut on the left to the model's length, and counted",
    "mixed_precision_dtype": "load the model in the precision it is to run in, with dtype=",
}


@register_model("kvfold")
class KvfoldLM(HFLM):
    """A causal language model of the harness that answers every request from a compressed cache.

    Args:
        pretrained: as for HFLM, or "bundled".
        method: a `Method`, or a text such as "snapkv:window=16".
        budget: as for `CompressedCache`; a text is read as on the command line.
        seed: fixes the choice of random methods.
        device: as for HFLM; by default a GPU if there is one.
        options: other options of HFLM.

    Raises KvfoldError for an invalid method or budget, an unsupported model or a refused option,
    before any task is loaded.
    """

    def __init__(
        self,
        pretrained: Any,
        method: Method | str = "snapkv",
        budget: Budget | float | str | None = None,
        seed: int = 0,
        device: str | None = None,
        **options: Any,
    ) -> None:
        for name, instead in REFUSED.items():
            if options.get(name):
                raise KvfoldError(f"{name}= does not go with the model kvfold: {instead}")
        # Parsed before a large model is loaded, so that errors come at once.
        self.method = parse(method)
        self.budget = None if budget is None else Budget.of(budget)
        self.seed = seed
        self.cache_records: dict[str, CacheRecord] = defaultdict(CacheRecord)
        self.truncated = TruncationCount()
        if pretrained == "bundled":
            # As kvfold.bundled_model() loads it.
            pretrained = str(bundled.FOLDER)
            options.setdefault("dtype", "float32")
        super().__init__(pretrained, device=device_or_usual(device), **options)
        self._new_cache()

    def _new_cache(self) -> CompressedCache:
        return CompressedCache(
            self.model, self.method, self.budget, tokenizer=self.tokenizer, seed=self.seed
        )

    def _ids(self, tokens: tuple[int, ...] | list[int]) -> Tensor:
        return torch.tensor([tokens], dtype=torch.long, device=self.device)

    # --- log-likelihoods --------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each continuation; equal contexts are read once."""
        score.check_crops(self.method)
        splits = [
            score.ScoringSplit.of(context, after, self.max_length) for _, context, after in requests
        ]
        sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, split in enumerate(splits):
            self.truncated.add(split.truncated)
            sharing[split.prefill].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        # Longest first, so that out of memory occurs at once.
        for context in sorted(sharing, key=len, reverse=True):
            members = sharing[context]
            scored = self._score(context, [splits[index] for index in members])
            for index, answer in zip(members, scored, strict=True):
                answers[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
            bar.update(len(members))
        bar.close()
        return [answers[index] for index in range(len(requests))]

    def _score(
        self, context: tuple[int, ...], splits: list[score.ScoringSplit]
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of the continuations of one context.

        Continuations that differ only in their last token share one forward.
        """
        cache = self._new_cache()
        score.prefill(self.model, cache, self._ids(context))
        if context:
            self.cache_records["log_likelihood"].add(cache.stats())
        known: dict[tuple[int, ...], Tensor] = {}
        answers = []
        for split in splits:
            if split.scored_input not in known:
                inputs = self._ids(split.scored_input)
                known[split.scored_input] = score.log_probs(
                    self.model, cache, inputs, self.softmax_dtype
                )
            likely = known[split.scored_input]
            tokens = self._ids(split.continuation)[0]
            total = float(likely.gather(-1, tokens[:, None]).sum())
            answers.append((total, bool((likely.argmax(-1) == tokens).all())))
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, read token by token through the compressing cache.

        A text is split into HFLM's windows; each starts with an empty cache. Raises KvfoldError
        for methods and budgets that would never evict.
        """
        score.check_evicts_while_streaming(self.method, self.budget)
        totals = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank != 0):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            total = 0.0
            for given, scored in map(make_disjoint_window, windows):
                cache, ids = self._new_cache(), self._ids(given + scored)
                total += score.stream(self.model, cache, ids, len(scored), self.softmax_dtype)
                self.cache_records["rolling"].add(cache.stats())
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    # --- generation -------------------------------------------------------------------------

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """HFLM's token ids and mask, `[B, N]` each; tokens truncated on the left are counted."""
        ids, mask = super().tok_batch_encode(strings, padding_side, truncation=truncation)
        if left_truncate_len is None:
            return ids, mask
        for length in mask.sum(-1).tolist():
            self.truncated.add(max(0, length - left_truncate_len))
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Token ids `[B, N + new]` of left-padded prompts `context [B, N]` and their answers.

        The batch's rows share one cache.
        """
        if not options.get("do_sample"):
            options["do_sample"] = False
            options.pop("temperature", None)
        cache = self._new_cache()
        rows, length = context.shape
        produced: Tensor = generate(
            self.model,
            context,
            cache=cache,
            max_length=max_length,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, length, rows),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **options,
        )
        self.cache_records["generation"].add(cache.stats())
        return produced

    # --- the record -------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's record, plus under "kvfold" the method, the budget and the caches' statistics."""
        budget = self.budget
        return super().get_model_info() | {
            "kvfold": {
                "method": spelled_out(self.method),
                "budget": None if budget is None else str(budget),
                "seed": self.seed,
                # A task's context includes its question.
                "question_aware": True,
                "kept_nominal": budget.amount if budget and budget.kind == "ratio" else None,
                "truncated": dataclasses.asdict(self.truncated),
                **{kind: held.summary() for kind, held in self.cache_records.items()},
            }
        }
