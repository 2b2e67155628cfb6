# SPDX-License-Identifier: Apache-2.0
"""vLLM's specification and manager of pages, for layers that leave a context's first ones out."""

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
    """A full-attention layer that holds `part` of a context; layers of one part are one group."""

    part: float

    @classmethod
    def like(cls, spec: FullAttentionSpec, part: float) -> PartSpec:
        """The same with a part."""
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        return cls(**given, part=part)

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """One for a group; its layers are all alike."""
        assert all(spec == specs[0] for spec in specs)
        return copy.deepcopy(specs[0])

    def is_uniform_with_collection(self, specs: dict[str, Any]) -> bool:
        """Whether these layers can be one group."""
        return all(isinstance(s, PartSpec) and s.part == self.part for s in specs.values())


class PartManager(FullAttentionManager):
    """Gives a request null pages for what its layers leave out."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Asked once, when a request is admitted with what came from elsewhere: its context."""
        spec = self.kv_cache_spec
        return skipped(num_computed_tokens, spec.part, self.block_size)

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left out later."""
