# SPDX-License-Identifier: Apache-2.0
"""Cache spec and page manager of vLLM for layers that hold the last part of a context."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvfold.serve.vllm.per_layer.sizes import skipped


@dataclass(frozen=True, kw_only=True)
class PartSpec(FullAttentionSpec):
    """Spec of a full-attention layer that holds `part` of a context; one cache group per part."""

    part: float

    @classmethod
    def like(cls, spec: FullAttentionSpec, part: float) -> PartSpec:
        """A copy of `spec` with a part."""
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        return cls(**given, part=part)

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """The spec of a group, whose layers have equal specs."""
        assert all(spec == specs[0] for spec in specs)
        return copy.deepcopy(specs[0])

    def is_uniform_with_collection(self, specs: dict[str, Any]) -> bool:
        """True if these layers can be one cache group: all have this part."""
        return all(isinstance(s, PartSpec) and s.part == self.part for s in specs.values())


class PartManager(FullAttentionManager):
    """Page manager that gives a request null pages for positions its layers do not hold."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens of a context that get no page.

        vLLM asks once per request, when `num_computed_tokens` are those loaded by the connector.
        """
        return skipped(num_computed_tokens, self.kv_cache_spec.part, self.block_size)

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: no page is dropped later."""
