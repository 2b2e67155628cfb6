# SPDX-License-Identifier: Apache-2.0
"""`model.generate(custom_generate=FOLDER, …)` with a compressed KV cache."""

from typing import Any

import kvfold


def generate(
    model: Any,
    method: str = "snapkv",
    budget: float | str | None = None,
    prefill_chunk: int | None = None,
    **options: Any,
) -> Any:
    """What `model.generate` returns, for a prompt compressed to a fresh cache."""
    inputs, ids = options.pop("inputs", None), options.pop("input_ids", None)
    cache = kvfold.CompressedCache(model, method, budget, tokenizer=options.get("tokenizer"))
    return kvfold.generate(
        model, inputs if ids is None else ids, cache=cache, prefill_chunk=prefill_chunk, **options
    )
