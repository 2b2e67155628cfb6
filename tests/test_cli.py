# SPDX-License-Identifier: Apache-2.0
"""The command line: what it lists, what it runs, how it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import kvfold
from kvfold.cli import app
from kvfold.inspect.kept import kept_figure, kept_grid

WORDS = ["the", "grass", "is", "green", "sky", "blue", "here", "we", "go"]
PROMPT = " ".join(WORDS * 8)
SPECIAL = ["<pad>", "<bos>", "<unk>"]


def kvfold_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def refused(*arguments: str) -> str:
    """The message of a command that must be refused: the last line, after loading bars."""
    result = kvfold_command(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: ")
    return message


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def test_help_names_every_command() -> None:
    result = kvfold_command("--help")
    assert result.exit_code == 0
    for command in ("demo", "run", "methods"):
        assert command in result.output
        assert kvfold_command(command, "--help").exit_code == 0


def test_methods_lists_every_name_within_100_columns() -> None:
    result = kvfold_command("methods")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    named = {line.split()[0] for line in lines if re.match(r"  \w", line)}
    assert named >= set(kvfold.methods())


def test_run_answers_and_counts(folder: Path) -> None:
    result = kvfold_command(
        "run", str(folder), "--method", "knorm", "--budget", "20", "--prompt", PROMPT,
        "--max-new-tokens", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    # 72 words; of 4 generated tokens the last is never read, and 3 come on top of 20.
    assert re.search(r"tokens seen +75\b", result.output)
    assert re.search(r"kept in layers 0-1 +23 per KV head", result.output)
    assert re.search(r"per generated token +[\d.]+ m?s", result.output)


def test_run_gives_the_model_s_own_answer_with_the_full_cache(folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    result = kvfold_command(
        "run", str(folder), "--method", "full", "--file", str(prompt), "--max-new-tokens", "5",
        "--prefill-chunk", "7", "--no-chat",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    tokenizer = word_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = tiny_llama().eval().generate(ids, max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) in result.output


def test_run_refuses_what_the_library_refuses(folder: Path) -> None:
    model = str(folder)
    assert "unknown method 'snapkw'" in refused(
        "run", model, "--method", "snapkw", "--budget", "0.2", "--prompt", PROMPT
    )
    assert "cannot read 'much'" in refused("run", model, "--budget", "much", "--prompt", PROMPT)
    assert "needs a budget" in refused("run", model, "--prompt", PROMPT)
    assert "at least 32" in refused("run", model, "--budget", "5", "--prompt", PROMPT)
    assert "takes no budget" in refused(
        "run", model, "--method", "full", "--budget", "5", "--prompt", PROMPT
    )


def test_run_refuses_a_missing_or_double_prompt(folder: Path, tmp_path: Path) -> None:
    model = str(folder)
    run = ("run", model, "--method", "full")
    assert "--prompt TEXT or as --file PATH" in refused(*run)
    assert "--prompt TEXT or as --file PATH" in refused(*run, "--prompt", "a", "--file", "b")
    assert "cannot read" in refused(*run, "--file", str(tmp_path / "nothing"))
    assert "empty" in refused(*run, "--prompt", " ")
    assert "no chat template" in refused(*run, "--prompt", PROMPT, "--chat")


def test_run_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "cannot load" in refused("run", str(tmp_path), "--method", "full", "--prompt", PROMPT)


def test_demo_refuses_bad_budgets() -> None:
    assert "cannot read 'much'" in refused("demo", "--budgets", "0.5 much")
    assert "no budgets" in refused("demo", "--budgets", " ")


def test_kept_grid_marks_each_head_s_positions() -> None:
    layer = [[torch.tensor([0, 3]), torch.tensor([2])]]
    grid = kept_grid([layer, [[torch.tensor([1]), torch.tensor([], dtype=torch.long)]]], seen=4)
    expected = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert np.array_equal(grid, np.array(expected, dtype=bool))


def test_kept_figure_has_one_panel_per_label_and_counts_needles() -> None:
    heads = [[torch.arange(10), torch.arange(5, 15)]]
    figure = kept_figure({"first": [heads], "second": [heads]}, 20, [(0, 10)])
    assert [panel.get_title("left") for panel in figure.axes] == ["first", "second"]
    # 20 of 40 entries are kept; of the needle's 20 the heads hold 10 and 5.
    note = figure.axes[0].get_title("right")
    assert "kept 50.0%" in note
    assert "75.0% of those in needles" in note
