# SPDX-License-Identifier: Apache-2.0
"""Checks of vLLM's settings and requests that would otherwise give silently wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.placeholders import PREFIX, ServedContext, ServedFolder
from kvfold.serve.vllm.request import CONTEXT


def check_engine(config: Any, groups: int) -> None:
    """Raises KvfoldError for settings of vLLM under which pages would be filled wrongly.

    `config` is its `VllmConfig`, `groups` the number of its cache groups.
    """
    parallel = config.parallel_config
    wrong = {
        "kv_load_failure_policy": config.kv_transfer_config.kv_load_failure_policy != "fail"
        and "a context that cannot be loaded would be computed from its placeholders: leave it at "
        "'fail'",
        "speculative_config": config.speculative_config is not None
        and "the draft model's pages would stay empty: leave it out",
        "quantization": config.model_config.quantization is not None
        and "kvfold cannot compare quantized weights with those of a context: leave it out",
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1
        and "it was never tested: use tensor parallelism",
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1
        and "pages are laid out otherwise: leave it at 1",
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1
        and "pages are laid out otherwise: leave it at 1",
        "the model": groups != 1
        and "its layers are of several kinds, and kvfold fills one: use kvfold's own server",
    }
    found = [f"{name}: {why}" for name, why in wrong.items() if why]
    if found:
        raise KvfoldError(f"vLLM cannot serve compressed contexts with {'; '.join(found)}")


def context_of(
    request: Any, served_folder: ServedFolder, check: Callable[[ServedContext], None]
) -> ServedContext | None:
    """The context that a request of vLLM names, or None for an ordinary request.

    Raises KvfoldError if the answer would be wrong: missing or foreign salt, wrong placeholders, no
    question, unsupported options; and what `check` raises for a context of another model.
    """
    named = (request.kv_transfer_params or {}).get(CONTEXT)
    own_salt = (request.cache_salt or "").startswith(PREFIX)
    if named is None:
        if own_salt:
            raise KvfoldError(
                f"its cache_salt is a context's, but kv_transfer_params name none: its "
                f"placeholders would be read as text; send {{{CONTEXT!r}: id}} too"
            )
        return None
    served = served_folder.get(named)
    if request.cache_salt != served.salt:
        raise KvfoldError(
            f"a request to context {served.id} needs cache_salt {served.salt!r}, not "
            f"{request.cache_salt!r}: without it, contexts would share pages"
        )
    given = request.prompt_token_ids or []
    if given[: served.kept] != served.tokens:
        raise KvfoldError(
            f"the prompt does not begin with the {served.kept} placeholders of context {served.id}"
        )
    if len(given) == served.kept:
        raise KvfoldError(f"nothing follows the {served.kept} placeholders of context {served.id}")
    _check_use(request)
    check(served)
    return served


def _check_use(request: Any) -> None:
    """Raises KvfoldError for options that need the model to read the placeholders."""
    sampling = request.sampling_params
    wrong = {
        "prompt_logprobs": sampling is not None and sampling.prompt_logprobs is not None,
        "skip_reading_prefix_cache": bool(request.skip_reading_prefix_cache),
        "pooling": sampling is None,
        "a LoRA adapter": request.lora_request is not None,
        "images or sound": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None,
    }
    found = [name for name, asked in wrong.items() if asked]
    if found:
        raise KvfoldError(f"a compressed context does not go with {' and '.join(found)}")
