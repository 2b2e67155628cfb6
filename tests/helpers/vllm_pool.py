# SPDX-License-Identifier: Apache-2.0
"""vLLM's pool of blocks, its manager and requests, as far as evictions touch them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvfold.serve.vllm.evictions.asked import EVICT


@dataclass(eq=False)
class Block:
    """A block, which one request holds, or none."""

    block_id: int
    held: int = 0


class Pool:
    """Blocks 1 to `count`; number 0 is the null block, which is never free."""

    def __init__(self, count: int) -> None:
        self.null_block, self.num_gpu_blocks = Block(0), count + 1
        self.free = [Block(number) for number in range(1, count + 1)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Block]:
        assert count <= len(self.free), "more blocks than there are"
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.held += 1
        return taken

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block is not self.null_block:
                assert block.held == 1, f"block {block.block_id} is free already"
                block.held = 0
                self.free.append(block)


class Manager:
    """vLLM's manager: a table of blocks for each request."""

    def __init__(self, count: int) -> None:
        self.block_pool = Pool(count)
        self.tables: dict[str, list[Block]] = {}
        self.coordinator = SimpleNamespace(
            single_type_managers=[SimpleNamespace(req_to_blocks=self.tables)]
        )

    def hold(self, request: Any, tokens: int, block: int) -> None:
        """Gives a request blocks for so many tokens."""
        table = self.tables.setdefault(request.request_id, [])
        table += self.block_pool.get_new_blocks(-(-tokens // block) - len(table))

    def give_back(self, request: Any) -> None:
        """Frees a request's blocks, as vLLM does when it ends or is preempted."""
        self.block_pool.free_blocks(self.tables.pop(request.request_id, []))


@dataclass
class FakeRequest:
    """What vLLM knows of a request."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    sampling_params: Any = field(default_factory=SimpleNamespace)
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_output_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request_of(name: str, tokens: int, block: int, **evict: Any) -> FakeRequest:
    """A request over tokens 0, 1, …, and the hashes of its whole blocks."""
    hashes = [bytes([number]) * 32 for number in range(tokens // block)]
    asked = {EVICT: evict} if evict else None
    return FakeRequest(name, list(range(tokens)), asked, block_hashes=hashes)
