# SPDX-License-Identifier: Apache-2.0
"""Models whose weights bitsandbytes or torchao have quantized: the same answers, or one line.

Without these packages the tests are skipped; `make test-quantized` runs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import kvfold
from kvfold import ContextFileError, UnsupportedModel
from kvfold.hf.identity import checksum
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

IDS = torch.randint(3, 12, (1, 64), generator=torch.Generator().manual_seed(0))
STEPS = torch.randint(3, 12, (1, 6), generator=torch.Generator().manual_seed(1)).split(1, 1)


def _eight_bits() -> Any:
    return BitsAndBytesConfig(load_in_8bit=True)


def _four_bits() -> Any:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bitsandbytes-int8": ("bitsandbytes", _eight_bits),
    "bitsandbytes-nf4": ("bitsandbytes", _four_bits),
    "torchao-int8": ("torchao", _torchao),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections are multiples of 32 wide, as 4-bit kernels need."""
    made = tmp_path_factory.mktemp("model")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    new_model(hidden_size=64, head_dim=16, **sizes).save_pretrained(made)
    return made


@pytest.fixture(params=KINDS)
def load(request: pytest.FixtureRequest, folder: Path) -> Callable[[], PreTrainedModel]:
    package, config = KINDS[request.param]
    reason = f"weights are quantized with the package {package}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package, reason=reason, exc_type=ImportError)

    def loaded() -> PreTrainedModel:
        options = {"quantization_config": config(), "device_map": "cpu", "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        model.generation_config.suppress_tokens = [0, 1, 2]
        return model

    return loaded


@pytest.mark.cases(1)
@pytest.mark.slow
def test_a_budget_for_everything_changes_no_bit(load, folder):
    model = load()
    plain, compressed = (
        Reader(load(), stock_cache(model)),
        Reader(model, kvfold.CompressedCache(model, "snapkv:window=8", 1.0)),
    )
    unquantized = AutoModelForCausalLM.from_pretrained(folder)
    exact = Reader(unquantized, stock_cache(unquantized))(IDS)
    first = plain(IDS)
    assert torch.equal(compressed(IDS), first) and worst(first, exact) > 1e-3
    for step in STEPS:
        assert torch.equal(compressed(step), plain(step))


def test_after_eviction_it_is_masked_dense(load):
    model = load()
    cache = kvfold.CompressedCache(model, "snapkv:window=8", 20)
    truth, got = MaskedDense(load()), Reader(model, cache)
    plain = Reader(load(), stock_cache(model))
    for reader in (truth, got, plain):
        reader(IDS)
    truth.hide(cache)
    for step in STEPS:
        expected, found, everything = (reader(step) for reader in (truth, got, plain))
        assert worst(found, expected) < 1e-4 and worst(everything, expected) > 0.1


@pytest.mark.slow
@pytest.mark.cases(1)
def test_a_context_file_is_of_these_weights(load, folder, tmp_path):
    tokenizer = word_tokenizer()
    context = kvfold.compress(load(), tokenizer, DOCUMENT, "kvzip", 40)
    context.save(tmp_path / "a.kvfold")
    # A model that has not run yet.
    loaded = kvfold.load(tmp_path / "a.kvfold", load(), tokenizer)
    assert loaded.ask(QUESTION) == context.ask(QUESTION)
    with pytest.raises(ContextFileError, match="other weights"):
        kvfold.load(tmp_path / "a.kvfold", AutoModelForCausalLM.from_pretrained(folder), tokenizer)


def test_weights_are_the_same_before_and_after_the_first_forward(load):
    model = load()
    before = checksum(model.named_parameters())
    with torch.no_grad():
        model(IDS)
    assert checksum(model.named_parameters()) == before


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["criticalkv", "kvzip_plus"])
def test_methods_that_read_a_weight_are_refused(load, spec):
    with pytest.raises(UnsupportedModel, match="load the model whole and unquantized"):
        kvfold.compress(load(), word_tokenizer(), DOCUMENT, spec, 40)
