# SPDX-License-Identifier: Apache-2.0
"""Training data of a scorer: the entries of a text, and the scores that KVzip gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.cache.observe import observation_of_stored
from kvfold.errors import KvfoldError
from kvfold.generation.reading import read_on
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.base import Method, parse
from kvfold.methods.stages.score.learned import entry_features
from kvfold.observers.reconstruction import ContextReconstruction

LEAST = 1e-6  # attention below it is no different from none


@dataclass(frozen=True)
class ScoredText:
    """Entries of one text in every layer and KV head, and the target method's scores of them.

    `features [L, H, T, F]`, `scores [L, H, T]`, float32. The first `opening` tokens are the chat
    template's, which the target keeps in any case.
    """

    features: Tensor
    scores: Tensor
    opening: int

    @property
    def targets(self) -> Tensor:
        """Natural logarithms of the scores `[L, H, T]`."""
        return self.scores.clamp(min=LEAST).log()


def target_method(target: str) -> Method:
    """The method whose scores are learned, with un-rotated keys beside what it reads itself.

    Raises KvfoldError unless it scores by a reconstruction, over all entries.
    """
    method = parse(target)
    reconstruction = method.stages().needs.get(ContextReconstruction)
    if reconstruction is None or reconstruction.head_scores is not None:
        raise KvfoldError(
            f"a scorer learns what the model attends to when it repeats a text, and {method} lets "
            "it repeat none: choose kvzip or kvzip_plus"
        )
    return method


@torch.no_grad()
def scored(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, method: Method
) -> ScoredText:
    """Reads a text as a user's message, lets the model repeat it, and scores all of its entries."""
    cache = CompressedCache(model, method, 1.0, tokenizer=tokenizer)
    for state in cache.states:
        state.plan.rotation.check_reversible()
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text).to(model.device)
    features, scores = [], []
    with cache.reading():
        read_on(model, cache, ids)
        for state in cache.states:
            observation = observation_of_stored(state, unrotated=True)
            scores.append(state.observers[ContextReconstruction].scores[0].float())
            features.append(entry_features(observation.unrotated(), observation.values)[0])
    prefix = cache.phase.prefix
    assert prefix is not None
    device = features[0].device  # layers may be on several
    return ScoredText(
        torch.stack([each.to(device) for each in features]),
        torch.stack([each.to(device) for each in scores]),
        int(prefix[0]),
    )
