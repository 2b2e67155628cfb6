# SPDX-License-Identifier: Apache-2.0
"""Tests have addresses: kvfold/store/ragged.py is tested by tests/store/test_ragged.py.

What spans modules is in tests/properties/. Modules of the data path without a test file of their
own are named here, with the file that tests them.
"""

from __future__ import annotations

from pathlib import Path

import kvfold

PACKAGE, TESTS = Path(kvfold.__file__).parent, Path(__file__).parent
WINGS = (
    "attention",
    "cache",
    "store",
    "kernels",
    "methods",
    "observers",
    "policies",
    "generation",
    "contexts",
    "hf",
    "jobs",
)
TESTED_BY = {
    "attention/attend.py": "properties/test_exactness.py",
    "attention/function.py": "hf/test_attention.py",
    "attention/handshake.py": "hf/test_models.py",
    "attention/mask.py": "attention/test_padding.py",
    "cache/byte_count.py": "properties/test_bytes.py",
    "cache/consecutive.py": "methods/test_reindex.py",
    "cache/evict.py": "methods/test_every_method.py",
    "cache/history.py": "cache/test_continuation.py",
    "cache/layer.py": "cache/test_cache.py",
    "cache/level.py": "methods/test_level.py",
    "cache/parts.py": "cache/test_cache.py",
    "cache/phase.py": "cache/test_cache.py",
    "cache/plan.py": "cache/test_setup.py",
    "cache/prefill.py": "methods/test_every_method.py",
    "cache/refit.py": "methods/test_match.py",
    "cache/rounds.py": "methods/test_every.py",
    "cache/barrier.py": "cache/test_decode.py",
    "observers/call.py": "properties/test_exactness.py",
    "observers/column_sums.py": "methods/test_evicting_while_decoding.py",
    "observers/fitted.py": "methods/test_zap.py",
    "observers/of_layer.py": "cache/test_state.py",
    "observers/reconstruction.py": "methods/test_kvzip.py",
    "observers/references.py": "methods/test_match.py",
    "observers/stored.py": "cache/test_observe.py",
    "store/sequence.py": "methods/test_every_method.py",
    "contexts/context.py": "contexts/test_answer.py",
    "contexts/document.py": "contexts/test_edits.py",
    "contexts/files/header.py": "contexts/files/test_format.py",
    "contexts/session_record.py": "contexts/test_session.py",
    "generation/head_scores.py": "methods/test_kvzip.py",
    "generation/readers/layerwise.py": "methods/test_pyramidinfer.py",
    "generation/readers/plain.py": "generation/test_pieces.py",
    "generation/readers/reconstruct.py": "methods/test_kvzip.py",
    "generation/reading.py": "generation/test_read_per_chunk.py",
    "generation/request.py": "generation/test_inputs.py",
    "generation/static/evicting.py": "generation/static/test_decode.py",
    "generation/static/layer.py": "generation/static/test_decode.py",
    "generation/static/ragged.py": "generation/static/test_decode.py",
    "hf/chat_template.py": "contexts/test_chat.py",
    "hf/compiling.py": "generation/static/test_decode.py",
    "hf/decoder_layers.py": "methods/test_pyramidinfer.py",
    "hf/forward_hooks.py": "cache/test_open_forward.py",
    "hf/header.py": "contexts/files/test_identity.py",
    "hf/identity.py": "contexts/files/test_identity.py",
    "hf/image_spans.py": "properties/test_images.py",
    "hf/rope_deltas.py": "properties/test_images.py",
    "hf/stock_layers.py": "contexts/files/test_stock_layers.py",
    "jobs/compress.py": "cli/test_compress_many.py",
    "jobs/executor.py": "jobs/test_processes.py",
    "kernels/full_precision.py": "properties/test_autocast.py",
    "kernels/cold_bytes.py": "kernels/test_cold.py",
    "kernels/logits.py": "kernels/test_reference.py",
    "kernels/segment_parts.py": "kernels/test_ragged.py",
    "kernels/triton/codes.py": "kernels/triton/test_attention.py",
    "kernels/triton/online_softmax.py": "kernels/triton/test_attention.py",
    "kernels/views.py": "kernels/test_ragged.py",
    "methods/observing.py": "cache/test_copy_to_budget.py",
    "methods/full.py": "methods/test_every_method.py",
    "methods/h2o.py": "methods/test_evicting_while_decoding.py",
    "methods/kivi.py": "cache/test_encode.py",
    "methods/local_window.py": "methods/test_evicting_while_decoding.py",
    "methods/minicache.py": "cache/test_encode.py",
    "methods/non_causal.py": "methods/test_compactor.py",
    "methods/observation.py": "methods/stages/score/test_observation_window.py",
    "methods/stages/allocate/retrieval.py": "methods/test_duo.py",
    "methods/stages/allocate/tolerance.py": "methods/test_auto.py",
    "methods/stages/when.py": "methods/test_every.py",
    "methods/method.py": "methods/test_own_methods.py",
    "methods/stages/base.py": "methods/test_every.py",
    "methods/stages/merge/base.py": "methods/stages/merge/test_most_similar.py",
    "methods/stages/refit/base.py": "methods/test_match.py",
    "methods/stages/score/chunk_attention.py": "methods/test_compactor.py",
    "methods/stages/score/distant_queries.py": "methods/test_triattention.py",
    "methods/stages/score/filters.py": "methods/test_qfilter.py",
    "methods/stages/score/learned.py": "methods/test_zap.py",
    "methods/stages/score/output_error.py": "methods/test_auto.py",
    "methods/stages/score/redundancy.py": "methods/test_rkv.py",
    "methods/stages/score/repetition.py": "methods/test_kvzip.py",
    "methods/stages/select/one_set.py": "policies/test_kept.py",
    "methods/stages/select/token_pruning.py": "methods/test_pyramidinfer.py",
    "methods/think.py": "cache/test_encode.py",
    "policies/prefill.py": "policies/test_method_policy.py",
    "store/base.py": "store/test_dense.py",
    "store/entry_columns.py": "store/test_dense.py",
    "store/ragged_part.py": "store/test_ragged.py",
    "store/reindexed_sinks.py": "methods/test_streaming_llm.py",
}


def address(module: str) -> Path:
    """Where the tests of a module are, by its name."""
    path = Path(module)
    return TESTS / path.parent / f"test_{path.name}"


def modules() -> list[str]:
    """Every file of the data path's wings, packages' own files apart."""
    found = (path for wing in WINGS for path in (PACKAGE / wing).rglob("*.py"))
    return sorted(
        path.relative_to(PACKAGE).as_posix() for path in found if not path.name.startswith("_")
    )


def test_modules_are_tested_at_their_address_or_where_the_list_says() -> None:
    listed = {module: TESTS / TESTED_BY.get(module, address(module)) for module in modules()}
    assert not [module for module, file in listed.items() if not file.is_file()]


def test_the_list_names_nothing_that_is_gone_or_has_an_address() -> None:
    assert not TESTED_BY.keys() - set(modules())
    assert not [module for module in TESTED_BY if address(module).exists()]


def test_folders_of_tests_are_those_of_the_package() -> None:
    own = {"helpers", "properties", "docs_site"}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert not {
        str(folder)
        for folder in folders
        if folder.parts[:1] and folder.parts[0] not in own and not (PACKAGE / folder).is_dir()
    }
