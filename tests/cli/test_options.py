# SPDX-License-Identifier: Apache-2.0
"""Options, help and refusals that all commands share."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.bench import words
from kvfold.cli.options import read_text
from kvfold.evidence.outputs import check_own
from tests.helpers.commands import kvfold_command, refused


def test_help_names_every_command() -> None:
    result = kvfold_command("--help")
    assert result.exit_code == 0
    for command in ("demo", "run", "methods"):
        assert command in result.output
        assert kvfold_command(command, "--help").exit_code == 0


def untouched(*arguments: str) -> str:
    """The message of a command that is refused before any model is loaded."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never)
        patch.setattr("transformers.AutoTokenizer.from_pretrained", never)
        return refused(*arguments)


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "bundled", "--prompt", "a"), "needs a budget"),
        (("run", "bundled", "--budget=50", "--prompt=a", "--seed", "9" * 30), "beyond 64 bits"),
        (("fit", "bundled", "a.txt", "--seed", "9" * 30), "beyond 64 bits"),
        (("bench", "small", "--seed", "9" * 30), "beyond 64 bits"),
        (("run", "bundled", "--method", "kivi", "--budget", "0.2", "--prompt", "a"), "takes no"),
        (("run", "bundled", "--budget", "5", "--prompt", "a"), "at least 32"),
        (("run", "bundled", "--method", "merge", "--budget", "0.2", "--prompt", "a"), "merge"),
        (("run", "bundled", "--budget", "0.2", "--file", "absent.txt"), "there is no such file"),
        (
            ("run", "bundled", "--budget", "0.2", "--prompt", "a", "--compress", "per_chunk"),
            "--prefill-chunk",
        ),
        (("run", "bundled", "--budget", "0.2", "--prompt", "a", "--top-p", "0.9"), "temperature"),
        (("run", "bundled", "--budget", "0.2", "--prompt", "a", "--temperature", "1e-9"), "0.01"),
        (("run", "bundled", "--budget", "0.2", "--file", "."), "cannot read .: Is a directory"),
        (("report", "absent"), "cannot read absent: No such file or directory"),
        (("run", "./absent", "--budget", "0.2", "--prompt", "a"), "there is no such folder"),
        (("run", __file__, "--budget", "0.2", "--prompt", "a"), "a file; name the folder"),
        (("compress", "bundled", "absent.txt"), "there is no such file"),
        (("compress", "bundled", __file__, "--method", "snapkv", "--budget", "3"), "at least 32"),
        (("compress", "bundled", __file__, "--method", "snapkw"), "did you mean 'snapkv'?"),
        (("ask", "bundled", "absent.kvfold", "why"), "absent.kvfold"),
        (("inspect", "--methods", "snapkv", "--budget", "3"), "at least 32"),
        (("inspect", "--file", "absent.txt"), "there is no such file"),
        (("inspect", "a", "--model", "b"), "named twice, a and --model b: leave one out"),
        (("eval", "a", "--model", "a", "--tasks", "niah"), "leave one out"),
        (("demo", "a", "--model", "b"), "leave one out"),
        (("eval", __file__, "--tasks", "niah"), "a file; name the folder"),
        (("inspect", __file__), "a file; name the folder"),
        (("demo", __file__, "--page", "absent.html"), "a file; name the folder"),
        (("eval", "--tasks", "niah_multikey_1"), "did you mean 'ruler_niah_multikey_1'?"),
        (("eval", "--tasks", "longbench"), "longbench needs data, as --data: a folder with narr"),
        (("eval", "--tasks", "niah", "--haystack", "absent"), "no such file or folder: absent"),
        (("eval", "--tasks", "jsonl", "--data", "absent.jsonl"), "there is no file absent.jsonl"),
        (("eval", "--tasks", "niah", "--lengths", "many"), "no positive whole number"),
        (("run", "./absent.gguf", "--budget", "0.2", "--prompt", "a"), "there is no such file"),
        (("run", "bundled", "--budget", "0,2", "--prompt", "a"), "with a point"),
        (("methods", "KVzip+"), "write 'kvzip_plus'"),
        (("serve", "bundled", "--method", "nope"), "unknown method 'nope'"),
        (("serve", "bundled", "--method", "snapkv", "--budget", "5"), "at least 32"),
        (("serve", "bundled", "--budget", "much"), "cannot read 'much'"),
        (("serve", "bundled", "--method", "kivi", "--budget", "0.3"), "kivi takes no budget"),
        (("fit", "bundled", "-", "-"), "standard input is read once"),
        (
            ("run", "bundled", "--budget", "1", "--prompt", "a", "--device", "cpu",
             "--device-map", "auto", "--method", "knorm"),
            "leave out the device",
        ),
        (
            ("run", "bundled", "--budget", "1", "--prompt", "a", "--revision", "main",
             "--method", "knorm"),
            "one revision",
        ),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in untouched(*arguments)


def test_a_number_and_its_unit_are_one_word_of_a_list() -> None:
    assert words("10 %, 0.2 512,1 GiB  2GiB 10%") == ["10%", "0.2", "512", "1GiB", "2GiB"]


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfIt rained.")
    assert read_text(path, encoding) == "It rained."
    path.write_text("It rained.")
    assert read_text(path, encoding) == "It rained."
    with pytest.raises(kvfold.KvfoldError, match="unknown encoding 'utf-9'"):
        read_text(path, "utf-9")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "ascii"])
def test_a_text_in_another_encoding_is_refused_in_one_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("Es regnet über Köln!".encode("latin-1") + b"\x00\xd8")
    with pytest.raises(kvfold.KvfoldError, match=f"as {encoding}: .*give the right --encoding"):
        read_text(path, encoding)
    # Of commands without the option.
    with pytest.raises(kvfold.KvfoldError, match=r"as utf-8: .*save it as UTF-8"):
        read_text(path)


def test_a_file_that_is_not_kvfold_s_is_not_written_over(tmp_path: Path) -> None:
    own, other = tmp_path / "own.html", tmp_path / "index.html"
    own.write_text('<html><meta name="generator" content="kvfold">')
    check_own(own, tmp_path / "absent.html")
    for text in ("My home page", "<html>My notes on kvfold</html>"):
        other.write_text(text)
        for command in (
            ["report", "records.jsonl", "--out", str(tmp_path)],
            ["check", "no/model", "prompts.jsonl", "--out", str(tmp_path)],
            ["check", "no/model", "prompts.jsonl", "--out", str(tmp_path), "--force"],
            ["demo", "--model", "no/model", "--page", str(other)],
        ):
            assert "index.html is not of kvfold: choose another --" in refused(*command)
    other.write_text("")
    check_own(other)


def test_version_and_short_help() -> None:
    assert kvfold_command("--version").output == f"kvfold {kvfold.__version__}\n"
    assert kvfold_command("run", "-h").output == kvfold_command("run", "--help").output


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("command", ["run", "compress", "ask", "eval", "inspect", "serve"])
def test_every_command_that_loads_a_model_has_the_same_options(command: str) -> None:
    shown = kvfold_command(command, "--help").output
    for option in ("dtype", "device", "device-map", "attn-implementation", "revision",
                   "trust-remote-code", "gguf-file", "adapter"):  # fmt: skip
        assert f"--{option} " in shown


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*_: object) -> str:
        warnings.warn("re-routed to sdpa", stacklevel=1)
        return ""

    monkeypatch.setattr("kvfold.cli.methods.defaults", warned)
    assert kvfold_command("methods").stderr == "warning: re-routed to sdpa\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "--tasks", "niah", "--methods", "snapkv", "--out"),
        ("check", "bundled", "{prompts}", "--methods", "snapkv", "--out"),
        ("report", "{prompts}", "--out"),
        ("inspect", "--prompt", "A text.", "--out"),
        ("bench", "bundled", "--out"),
        ("demo", "--page"),
        ("compress", "bundled", "{prompts}", "--method", "snapkv", "--out"),
        ("fit", "bundled", "{prompts}", "--out"),
    ],
)
def test_places_that_cannot_be_written_are_found_before_a_model_is_loaded(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One."}\n{"prompt": "Two."}\n')

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("kvfold.loading._from_pretrained", no_model)
    given = [each.format(prompts=prompts) for each in arguments]
    out = prompts / "a.html"
    message = refused(*given, str(out))
    assert "cannot write" in message or "no folder" in message
    assert "Errno" not in message and ".tmp" not in message
    monkeypatch.setattr("kvfold.writing.TemporaryFile", full_disk)
    message = refused(*given, str(tmp_path / "a.html"))
    assert message.endswith("No space left on device") and "cannot write" in message


def full_disk(dir: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(dir / "x.tmp"))
