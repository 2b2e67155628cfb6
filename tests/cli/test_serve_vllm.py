# SPDX-License-Identifier: Apache-2.0
"""Options of `kvfold serve --engine vllm`: taken, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import kvfold_command, refused
from tests.helpers.tokenizers import tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "option",
    [
        ("--methods", "kvzip"), ("--memory", "4GiB"),
        ("--prefill-chunk", "1024"), ("--workers", "1"), ("--queue", "9"),
        ("--values", "9"), ("--connections", "9"), ("--client-timeout", "9"), ("--grace", "9"),
        ("--context-tokens", "9"), ("--answer-tokens", "9"), ("--chat-budget", "9"),
        ("--special-tokens",), ("--allow-longer",), ("--dtype", "auto"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing_with_vllm_are_refused_by_name(option, tmp_path):
    vllm = "serve", "bundled", "--engine", "vllm", "--folder", str(tmp_path)
    assert f"error: {option[0]}: not with --engine vllm" in refused(*vllm, *option)
    both = refused(*vllm, *option, "--port", "0", "--body", "1MiB", "--vllm", "", "--queue", "1")
    assert option[0] in both and "--queue" in both and "--port" not in both


def test_options_that_mean_something_with_vllm_are_taken(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "kvfold.cli.serve_vllm.serve", lambda model, **options: given.update(options)
    )
    words = ("--port", "0", "--body", "1MiB", "--api-key", "k", "--vllm", "--x 1")
    vllm = "serve", "bundled", "--engine", "vllm", "--folder", str(tmp_path), "--host", "::1"
    assert kvfold_command(*vllm, *words).exit_code == 0
    assert given == {
        "host": "::1", "port": 0, "api_key": "k", "folder": tmp_path, "body": 2**20,
        "arguments": "--x 1", "method": None, "budget": None, "contexts": 1000, "parts": None,
    }  # fmt: skip
    more = ("--method", "snapkv", "--budget", "0.3", "--contexts", "9", "--parts", "1,0.5")
    assert kvfold_command(*vllm, *more).exit_code == 0
    wanted = {"method": "snapkv", "budget": "0.3", "contexts": 9, "parts": "1,0.5"}
    assert given.items() >= wanted.items()


def test_what_is_for_vllm_is_refused_without_it():
    assert "are for --engine vllm" in refused("serve", "bundled", "--parts", "1,0.5")
