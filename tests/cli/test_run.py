# SPDX-License-Identifier: Apache-2.0
"""The command line: what it lists, what it runs, how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvfold
from kvfold.cli import app
from kvfold.cli.run import encode
from kvfold.contexts.answer import AnswerStream
from kvfold.loading import Loading, load
from tests.helpers.commands import kvfold_command, refused, run_json
from tests.helpers.models import build
from tests.helpers.tokenizers import PROMPT, SPECIAL, WORDS, tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


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


def test_run_holds_its_budget_over_long_answers(folder: Path) -> None:
    """72 words; 6 generated tokens are read, the last round is after the fourth."""
    given = ["run", str(folder), "--budget", "20", "--prompt", PROMPT, "--max-new-tokens", "7"]
    asked = run_json(*given, "--method", "knorm", "--every", "4")
    composed = run_json(*given, "--method", "knorm + every:interval=4")
    assert asked["answer"] == composed["answer"] and asked["stats"] == composed["stats"]
    assert {n for layer in asked["stats"]["kept"] for row in layer for n in row} == {22}


def test_run_bounds_an_answer(folder: Path) -> None:
    """72 words, 19 generated tokens are read: rounds of 4, after 20 entries."""
    given = ["run", str(folder), "--method", "knorm", "--prompt", PROMPT, "--max-new-tokens", "20"]
    bounded = run_json(*given, "--max-cache-tokens", "24", "--every", "4")
    composed = run_json(*given, "--budget", "20", "--every", "4")
    assert bounded["answer"] == composed["answer"] and bounded["stats"] == composed["stats"]
    assert {n for layer in bounded["stats"]["kept"] for row in layer for n in row} == {23}
    message = refused(*given[:3], "full", *given[4:], "--max-cache-tokens", "24")
    assert "takes no budget" in message


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


def test_run_refuses_rounds_of_a_method_that_evicts_at_every_token(folder: Path) -> None:
    message = refused(
        "run", str(folder), "--method", "h2o", "--budget", "9", "--every", "4", "--prompt", "a b",
    )  # fmt: skip
    assert "both bring the decode stage" in message


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


def test_run_prints_json_that_counts_the_same(folder: Path) -> None:
    arguments = ("run", str(folder), "--method", "knorm", "--budget", "20", "--prompt", PROMPT)
    made = run_json(*arguments, "--max-new-tokens", "4")
    assert made["stats"]["seen"] == 75 and made["stats"]["kept"] == [[[23, 23]]] * 2
    assert made["stats"]["nbytes"] > 0 and made["seconds"]["first_token"] > 0
    assert made["answer"] in kvfold_command(*arguments, "--max-new-tokens", "4").output


def test_run_reads_standard_input_and_encodings(folder: Path, tmp_path: Path) -> None:
    run = ("run", str(folder), "--method", "full", "--max-new-tokens", "3", "--file")
    piped = CliRunner().invoke(app, [*run, "-", "--json"], input=PROMPT)
    assert piped.exit_code == 0, piped.output
    assert json.loads(piped.stdout)["stats"]["seen"] == 74
    written = tmp_path / "prompt.txt"
    written.write_bytes("the grass is grün".encode("latin-1"))
    assert "give the right --encoding" in refused(*run, str(written))
    assert run_json(*run, str(written), "--encoding", "latin-1")["stats"]["seen"] == 6
    assert "unknown encoding" in refused(*run, str(written), "--encoding", "nope")


@pytest.mark.slow
def test_run_draws_by_its_seed(folder: Path) -> None:
    run = ("run", str(folder), "--method", "full", "--prompt", PROMPT, "--temperature", "2")
    answers = [run_json(*run, "--seed", seed)["answer"] for seed in "112"]
    assert answers[0] == answers[1] != answers[2]
    likeliest = run_json("run", str(folder), "--method", "full", "--prompt", PROMPT)["answer"]
    assert run_json(*run, "--top-k", "1")["answer"] == likeliest


def test_run_shows_tokens_as_they_come_and_ctrl_c_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def interrupted(self: Any, *arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return own(self, *arguments)

    own = AnswerStream.__call__
    run = ("run", str(folder), "--method", "full", "--prompt", PROMPT, "--max-new-tokens", "9")
    whole = run_json(*run)["answer"].split()
    monkeypatch.setattr(AnswerStream, "__call__", interrupted)
    result = kvfold_command(*run)
    assert result.exit_code == 130
    assert result.stdout.split()[-3:] == whole[:3]
    assert result.stderr.splitlines()[-1] == "stopped"
    assert "Traceback" not in result.output


def test_a_system_message_comes_before_the_prompt(folder: Path, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} {% endfor %}sky"
    )
    expected = tokenizer.apply_chat_template(
        [{"role": "system", "content": "we go"}, {"role": "user", "content": PROMPT}],
        return_dict=False,
    )
    assert encode(tokenizer, PROMPT, None, "we go")[0].tolist() == expected
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(kvfold.KvfoldError, match="drops system messages"):
        encode(tokenizer, PROMPT, None, "we go")
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(kvfold.KvfoldError, match="refuses messages of system, user: no system"):
        encode(tokenizer, PROMPT, None, "we go")
    assert "needs the chat template" in refused(
        "run", str(folder), "--method", "full", "--prompt", "a", "--system", "b"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_models_without_sdpa_run_by_their_own_attention(family: str, tmp_path: Path) -> None:
    model = build(family, vocab_size=len(SPECIAL + WORDS))
    assert model.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    run = ("run", str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "3")
    full = run_json(*run, "--method", "full")
    ids = word_tokenizer()(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    own = word_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert full["answer"] == own
    assert run_json(*run, "--method", "snapkv:window=4", "--budget", "20")["stats"]["kept"]
    message = refused(*run, "--method", "full", "--attn-implementation", "sdpa")
    assert "cannot load" in message and "does not support" in message


def test_dtype_and_attention_are_chosen(folder: Path) -> None:
    model, _ = load(str(folder), Loading(dtype="bfloat16", attn_implementation="eager"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    bundled, _ = load("bundled")
    assert bundled.dtype == torch.float32 and bundled.config._attn_implementation == "sdpa"


def test_an_adapter_changes_the_answer(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    made = peft.get_peft_model(tiny_llama(), settings)
    made.save_pretrained(tmp_path)
    ids = word_tokenizer()(PROMPT, return_tensors="pt").input_ids
    plain, _ = load(str(folder))
    adapted, _ = load(str(folder), Loading(adapter=str(tmp_path)))
    with torch.no_grad():
        expected, logits = made.eval()(ids).logits, adapted(ids).logits
        torch.testing.assert_close(logits, expected)
        assert not torch.allclose(logits, plain(ids).logits, atol=1e-3)
    with pytest.raises(kvfold.KvfoldError, match="there is no such folder"):
        load(str(folder), Loading(adapter="./absent"))


def test_a_gpu_without_memory_is_told_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("kvfold.generation.generate.generate", no_memory)
    monkeypatch.setattr(AnswerStream, "__call__", no_memory)
    result = kvfold_command(
        "run", str(folder), "--method", "knorm", "--budget", "20", "--prompt", PROMPT
    )
    assert result.exit_code == 2
    assert "error: out of memory: CUDA" in result.output and "--prefill-chunk" in result.output


def test_cold_bytes_are_told_beside_the_others(folder: Path) -> None:
    given = ["run", str(folder), "--method", "recall", "--prompt", PROMPT, "--max-new-tokens", "4"]
    assert "cold bytes beside them" in kvfold_command(*given).output
    assert run_json(*given)["stats"]["cold"]["host"] > 0
