# SPDX-License-Identifier: Apache-2.0
"""`docs/results/models.md` says what the checks of `docs/generate/model_checks.py` find."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from docs.generate import models as pages_models
from docs.generate.made import END, row

DOCS = Path(__file__).parents[2] / "docs"
MUCH_USED = (
    "LlamaForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "MixtralForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Phi3ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "JambaForCausalLM",
    "LlavaForConditionalGeneration",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "GotOcr2ForConditionalGeneration",  # its encoder computes attention itself
    "Kosmos2_5ForConditionalGeneration",  # counts positions itself
)


@pytest.fixture
def models() -> ModuleType:
    return pages_models


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MUCH_USED)
def test_the_page_has_what_a_fresh_run_finds(models: ModuleType, name: str) -> None:
    assert row(*models.row(name, models.check(name))) in (DOCS / "results" / "models.md").read_text(
        "utf-8"
    )


def test_the_page_is_made_of_the_records(models: ModuleType) -> None:
    known = dict(models._read(DOCS / "generate" / "architectures.jsonl"))
    assert models.block(known) in (DOCS / "results" / "models.md").read_text("utf-8")


def test_an_error_that_is_not_kvfolds_is_shown(models: ModuleType) -> None:
    failed = {"cache": models.Outcome(models.WRONG, "TypeError: no number")}
    block = models.block({"LlamaForCausalLM": failed})
    assert "| TypeError: no number | LlamaForCausalLM |" in block


@pytest.mark.slow
def test_refused_classes_are_listed_with_the_reason(models: ModuleType) -> None:
    page = (DOCS / "results" / "models.md").read_text("utf-8")
    for name in ("FalconForCausalLM", "T5ForConditionalGeneration", "MambaForCausalLM"):
        (outcome,) = models.check(name).values()
        assert outcome.verdict == models.REFUSED
        (line,) = [line for line in page.splitlines() if models.reason(name, outcome) in line]
        assert name in line.rpartition("|")[0].split("|")[-1]


def test_the_page_lists_every_class_once(models: ModuleType) -> None:
    page = (DOCS / "results" / "models.md").read_text("utf-8")
    block = page.partition(models.BEGIN)[2].partition(END)[0]
    words = block.replace("|", " ").replace(",", " ").replace(".", " ").split()
    listed = [word for word in words if word in models.architectures()]
    assert sorted(listed) == sorted(models.architectures())
