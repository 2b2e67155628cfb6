# SPDX-License-Identifier: Apache-2.0
"""References: a second endpoint, or a model in this process, each compared with an endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checks.engines.client import Endpoint
from kvfold.checks.engines.tokens import TopTokens, kl_at_least
from kvfold.checks.engines.vocabulary import tokens_by_bytes
from kvfold.errors import KvfoldError
from kvfold.generation.length import check_length
from kvfold.hf.chat_template import conversation
from kvfold.hf.user_text import segment_ids

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TokenComparison:
    """One prompt's next token at an endpoint, beside the reference's.

    `kl_at_least` is a lower bound of the KL, in nats; `covered` is the reference's probability of
    the tokens that it tells apart. `shared` is the share of listed tokens that are known to both.
    `read` are the prompt's tokens at the endpoint and the reference, where they say so.
    """

    agrees: bool
    kl_at_least: float
    covered: float
    shared: float
    read: tuple[int | None, int | None]


class Reference(Protocol):
    """What an endpoint is compared with."""

    def compared(self, messages: Messages, found: TopTokens) -> TokenComparison:
        """The comparison with the tokens `found` at the endpoint; raises KvfoldError."""
        ...


@dataclass(frozen=True)
class EndpointReference:
    """A second endpoint: only tokens that both list are told apart."""

    endpoint: Endpoint

    def compared(self, messages: Messages, found: TopTokens) -> TokenComparison:
        """As `Reference`."""
        own = self.endpoint.top_tokens(messages)
        both = own.probabilities.keys() & found.probabilities.keys()
        listed = min(len(own.probabilities), len(found.probabilities))
        pairs = [(own.probabilities[each], found.probabilities[each]) for each in sorted(both)]
        return TokenComparison(
            agrees=own.first is not None and own.first == found.first,
            kl_at_least=kl_at_least(pairs),
            covered=sum(p for p, _ in pairs),
            shared=len(both) / listed if listed else 1.0,
            read=(found.read, own.read),
        )


@dataclass(frozen=True)
class LocalReference:
    """A model in this process, all of whose probabilities are known."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    allow_longer: bool = False

    def compared(self, messages: Messages, found: TopTokens) -> TokenComparison:
        """As `Reference`; also for an endpoint's token that is none of this tokenizer."""
        ids = self._ids(messages)
        check_length(self.model, ids.shape[1] + 1, self.allow_longer)
        with torch.inference_mode():
            made = self.model(ids.to(self.model.device), use_cache=False, logits_to_keep=1)
        logprobs = made.logits[0, -1].double().log_softmax(-1).cpu()
        pairs, first = [], None
        for token, probability in found.probabilities.items():
            known = self._tokens.get(token)
            if known is None:
                raise KvfoldError(
                    f"the endpoint's token {token.decode(errors='replace')!r} is none of the "
                    "reference's tokenizer: compare with the model that is served"
                )
            if len(known) == 1:
                pairs.append((float(logprobs[known[0]].exp()), probability))
            if token == found.first:
                first = known
        return TokenComparison(
            agrees=first is not None and int(logprobs.argmax()) in first,
            kl_at_least=kl_at_least(pairs),
            covered=sum(p for p, _ in pairs),
            shared=1.0,
            read=(found.read, ids.shape[1]),
        )

    def _ids(self, messages: Messages) -> torch.Tensor:
        if not self.tokenizer.chat_template:
            raise KvfoldError(
                "the reference's tokenizer has no chat template, which the endpoint's messages "
                "need: set tokenizer.chat_template to the one that the endpoint uses"
            )
        said = [(each["role"], each["content"]) for each in messages]
        return torch.tensor([segment_ids(self.tokenizer, conversation(self.tokenizer, said))])

    @cached_property
    def _tokens(self) -> dict[bytes, list[int]]:
        return tokens_by_bytes(self.tokenizer)
