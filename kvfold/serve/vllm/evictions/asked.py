# SPDX-License-Identifier: Apache-2.0
"""What a request asks to evict, and the blocks that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvfold.budget import Budget
from kvfold.cache.plan import checked_budget
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import Across, Measured, parse, with_part
from kvfold.methods.description import files_of
from kvfold.methods.every import Every
from kvfold.methods.pages import Pages
from kvfold.methods.stages.when import Once
from kvfold.policies import Policy, policy
from kvfold.serve.vllm.export import Paged

# Key of vLLM's `kv_transfer_params`: {"method": "snapkv", "budget": 0.25, "every": 128}
EVICT = "kvfold"
NAMES = {"method", "budget", "every"}
LONGEST = 500  # characters of a method's text, which vLLM's scheduler reads between two steps
UNABLE = (
    "vLLM evicts on a CPU, or on a GPU with --untested-gpu, with entries of the model's own dtype"
)


@dataclass(frozen=True)
class Shape:
    """The model's layers, KV heads, bytes of an entry of one head, and vLLM's entries per block.

    `ranks` share the heads (tensor parallelism).
    """

    layers: int
    heads: int
    entry_bytes: int
    block: int
    ranks: int = 1


@dataclass(frozen=True)
class AskedEviction:
    """Eviction by a method's text to a budget, when a prompt has been read.

    Then again after each `every` generated tokens; None: these stay.
    """

    method: str
    budget: Budget | None
    every: int | None = None

    @classmethod
    def of(cls, given: Any, block: int) -> AskedEviction:
        """The eviction that a request's `given` parameters name, in pages of `block` entries.

        Raises KvfoldError for other parameters, and for a method that only a model can run.
        """
        if not isinstance(given, Mapping) or not {"method"} <= set(given) <= NAMES:
            raise KvfoldError(
                f"{EVICT!r} takes a method, its budget and every how many tokens, "
                f'{{"method": "snapkv", "budget": 0.25, "every": 128}}, not {given!r}'
            )
        method, budget, every = given["method"], given.get("budget"), given.get("every")
        if not isinstance(method, str):
            raise KvfoldError(f"a method is a text such as 'snapkv', not {method!r}")
        if len(method) > LONGEST:
            raise KvfoldError(
                f"a method's text has at most {LONGEST} characters, not {len(method)}"
            )
        made = parse(method)
        if every is not None:
            if not isinstance(every, int) or every < 1:
                raise KvfoldError(f"every is a whole number of tokens above 0, not {every!r}")
            made = with_part(made, Every(every))
        if made.stages().shape is None:
            made = with_part(made, Pages(block))
        if made.stages().shape != block:
            raise KvfoldError(f"{method} fills other pages than vLLM's: take pages:size={block}")
        limit = None if budget is None else Budget.of(budget)
        found = cls(str(made), limit, made.stages().interval)
        found.check()
        return found

    @classmethod
    def within(cls, given: Any, paged: Paged | None) -> AskedEviction:
        """As `of`, in vLLM's pages of single heads `paged`; KvfoldError if it evicts nothing."""
        if paged is None:
            raise KvfoldError(UNABLE)
        return cls.of(given, paged.block)

    @classmethod
    def of_request(cls, given: Any, paged: Paged | None) -> AskedEviction:
        """As `within`; KvfoldError for a method with a file: clients open none of the server's."""
        found = cls.within(given, paged)
        if files_of(found.policy.method):
            raise KvfoldError(
                f"{found.method} reads a file of the server: the server can be started with it as "
                "--method, and a request leaves it out"
            )
        return found

    @property
    def policy(self) -> Policy:
        """The method as a function of a prompt's tensors."""
        return _policy(self.method)

    def check(self) -> None:
        """Raises KvfoldError for a method that the engine's tensors are not enough for.

        BudgetError for a budget that is missing, superfluous or too small.
        """
        needs = self.policy.needs
        if self.every is not None and needs.queries == "all":
            raise KvfoldError(
                f"{self.method} sums attention up while it reads, and has no rounds here: leave "
                "every out, or take another method"
            )
        if self.every is not None and needs.token_ids:
            raise KvfoldError(
                f"{self.method} reads token ids, and vLLM may not know the last ones when a round "
                "comes: leave every out"
            )
        if isinstance(self.policy.stages.when, Once):
            raise KvfoldError(f"{self.method} waits for the first generated token: take another")
        allocate = self.policy.stages.allocate
        if self.every is not None and isinstance(allocate, Measured) and allocate.in_rounds:
            raise KvfoldError(f"{self.method} finds its sizes anew in each round: take another")
        if needs.output_weights:
            raise KvfoldError(f"{self.method} reads weights of the model: make a context with it")
        if self.policy.moves_keys:
            raise KvfoldError(f"{self.method} moves keys, which vLLM's pages do not: take another")
        checked_budget(self.policy.method, self.budget, self.policy.stages.forced.least)

    def window(self, tokens: int) -> int:
        """Last tokens whose queries the method reads at most, of a prompt of `tokens`."""
        wanted = self.policy.needs.queries
        return tokens if wanted == "all" else wanted

    def queries(self, tokens: int) -> int:
        """Last tokens of a prompt whose queries the method reads."""
        return min(self.window(tokens), tokens)

    def blocks(self, tokens: int, shape: Shape) -> int:
        """Blocks that hold what is kept of a prompt, at most; 0 where nothing ever leaves.

        Of a method without a budget, as many as the prompt's. Nothing leaves a prompt of which the
        part to keep fills less than a page in some layer. Raises BudgetError for a budget in tokens
        or bytes that does.
        """
        whole, stages = tokens // shape.block, self.policy.method.stages()
        if self.budget is None:
            return whole
        layers, heads, least = shape.layers, shape.heads, stages.forced.least
        total = self.budget.per_layer(tokens, shape.entry_bytes, layers, heads, 1)
        fits = total >= tokens * layers
        if fits and self.every is None:
            return 0
        # The answer fills what a prompt leaves of a budget.
        seen = max(tokens, total // layers) if self.every else tokens
        # Entries per head, and layers that share them.
        sizes = [(total, layers)]
        if not isinstance(stages.allocate, Across):
            schedule: Any = stages.allocate
            sizes = [(size, 1) for size in schedule(total, seen, layers)]
        leaves = not fits or self.every is not None
        if leaves and max(min(size // of for size, of in sizes), least) * heads < shape.block:
            return self._too_little(shape)
        of_heads = -(-least // shape.block)
        pages = sum(
            max(of, of * heads * of_heads, max(size, of * least) * heads // shape.block)
            for size, of in sizes
        )
        most = -(-pages // (layers * heads))
        if shape.ranks > 1:
            # One rank may hold all that heads keep unevenly, and the pages that do not share out.
            uneven = isinstance(stages.allocate, Across) or stages.heads is not None
            most = most * shape.ranks if uneven else most + 1
        return min(whole, most) if self.every is None else most

    def _too_little(self, shape: Shape) -> int:
        assert self.budget is not None
        if self.budget.kind != "ratio":
            raise BudgetError(
                f"{self.method} to {self.budget} fills less than a page of {shape.block} in some "
                "layer: raise the budget"
            )
        return 0


@lru_cache(maxsize=64)
def _policy(method: str) -> Policy:
    return policy(method)
