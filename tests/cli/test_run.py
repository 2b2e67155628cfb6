# SPDX-License-Identifier: Apache-2.0
"""The command line: what it lists, what it runs, how it refuses."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import kvfold
from kvfold.cli import app
from kvfold.cli.demo_page import page
from kvfold.cli.run import encode
from kvfold.contexts.answer import AnswerStream
from kvfold.eval.tasks import families, tasks
from kvfold.inspect.kept import kept_figure, kept_grid
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
    assert named >= set(kvfold.list_methods())


def test_methods_shows_one_in_full() -> None:
    result = kvfold_command("methods", "snapkv_official")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "The prompt's last queries vote" in shown and "arXiv 2404.14469" in shown
    assert kvfold.SnapKV.formula in shown
    assert re.search(r"window int 64 last queries that vote", shown)
    assert refused("methods", "snapkb").endswith("did you mean 'snapkv'?")
    assert run_json("methods", "tova")["formula"] == kvfold.TOVA.formula


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
    assert "name it a.html" in refused("demo", "--page", "a.png")


def test_the_demo_s_page_needs_nothing_else_and_escapes_its_text() -> None:
    rows = Table("method")
    rows.add_row(Text("<b>snapkv</b>"))
    made = page([Group("{braces} of text", rows)], Figure())
    assert "{braces} of text" in made and "&lt;b&gt;snapkv&lt;/b&gt;" in made
    assert made.count("<img ") == 1 and 'src="data:image/png;base64,' in made
    assert "http" not in made and "<script" not in made


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


def untouched(*arguments: str) -> str:
    """The message of a command that is refused before any model is loaded."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never)
        patch.setattr("transformers.AutoTokenizer.from_pretrained", never)
        return refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "bundled", "--prompt", "a"), "needs a budget"),
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
        (("run", "./absent", "--budget", "0.2", "--prompt", "a"), "there is no such folder"),
        (("run", __file__, "--budget", "0.2", "--prompt", "a"), "a file; name the folder"),
        (("compress", "bundled", "absent.txt"), "there is no such file"),
        (("compress", "bundled", __file__, "--method", "snapkv", "--budget", "3"), "at least 32"),
        (("compress", "bundled", __file__, "--method", "snapkw"), "did you mean 'snapkv'?"),
        (("ask", "bundled", "absent.kvfold", "why"), "absent.kvfold"),
        (("inspect", "--methods", "snapkv", "--budget", "3"), "at least 32"),
        (("inspect", "--file", "absent.txt"), "there is no such file"),
        (("eval", "--tasks", "niah_multikey_1"), "did you mean 'ruler_niah_multikey_1'?"),
        (("eval", "--tasks", "longbench"), "longbench needs data, as --data: a folder with narr"),
        (("eval", "--tasks", "niah", "--haystack", "absent"), "no such file or folder: absent"),
        (("eval", "--tasks", "jsonl", "--data", "absent.jsonl"), "there is no file absent.jsonl"),
        (("eval", "--tasks", "niah", "--lengths", "many"), "no positive whole number"),
        (("serve", "bundled", "--method", "nope"), "unknown method 'nope'"),
        (("serve", "bundled", "--method", "snapkv", "--budget", "5"), "at least 32"),
        (("serve", "bundled", "--budget", "much"), "cannot read 'much'"),
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


def test_version_and_short_help() -> None:
    assert kvfold_command("--version").output == f"kvfold {kvfold.__version__}\n"
    assert kvfold_command("run", "-h").output == kvfold_command("run", "--help").output


@pytest.mark.parametrize(
    "option",
    [
        ("--method", "kvzip"), ("--budget", "0.5"), ("--methods", "kvzip"), ("--memory", "4GiB"),
        ("--prefill-chunk", "1024"), ("--contexts", "9"), ("--workers", "1"), ("--queue", "9"),
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
        "arguments": "--x 1",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["run", "compress", "ask", "eval", "inspect", "serve"])
def test_every_command_that_loads_a_model_has_the_same_options(command: str) -> None:
    shown = kvfold_command(command, "--help").output
    for option in ("dtype", "device", "device-map", "attn-implementation", "revision",
                   "trust-remote-code", "gguf-file", "adapter"):  # fmt: skip
        assert f"--{option} " in shown


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
    with pytest.raises(kvfold.KvfoldError, match="takes no system message: no system"):
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


def test_tasks_lists_every_name_and_the_data_each_wants() -> None:
    listed = kvfold_command("tasks")
    assert listed.exit_code == 0, listed.output
    words = listed.output.replace(",", " ").split()
    assert set(words) >= set(tasks()) | set(families())
    found = {task["name"]: task for task in run_json("tasks")}
    assert set(found) == set(tasks())
    assert found["longbench_qasper"]["data"] == "qasper.jsonl"
    assert found["longbench_qasper"]["hub"] == "THUDM/LongBench"
    assert found["ruler_niah_single_1"]["data"] is None
    shown = kvfold_command("tasks", "loogle").output
    assert "longdep_summarization.jsonl" in shown.replace("\n", "").replace(" ", "")
    assert "did you mean 'ruler_vt'" in refused("tasks", "vt")


def test_the_page_of_tasks_names_every_file_of_data() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    for task in run_json("tasks"):
        assert f"`{task['name']}`" in page
        assert task["data"] is None or f"`{task['data']}`" in page


@pytest.mark.slow
def test_methods_and_context_files_as_json(folder: Path, tmp_path: Path) -> None:
    listed = {method["name"]: method for method in run_json("methods")}
    assert set(listed) == set(kvfold.list_methods())
    assert listed["snapkv"]["defaults"]["window"] == 32
    text, file = tmp_path / "text.txt", tmp_path / "text.kvfold"
    text.write_text(PROMPT)
    made = run_json("compress", str(folder), str(text), "--method", "knorm", "--budget", "20")
    assert made["file"] == str(file) and made["bytes"] == file.stat().st_size
    assert made["stats"]["kept"] == [[[20, 20]]] * 2
    assert [layer["kept"] for layer in run_json("info", str(file))["layers"]] == [[20, 20]] * 2
    ask = ("ask", str(folder), str(file), "the sky is")
    assert run_json(*ask)["answer"] in " ".join(kvfold_command(*ask).output.split())
    text.write_text(PROMPT + " again")
    both = run_json("compress", str(folder), str(text), str(folder / "config.json"), "-o",
                    str(tmp_path), "--method", "full")  # fmt: skip
    assert sorted(Path(one["file"]).name for one in both) == ["config.kvfold", "text.kvfold"]


def test_compress_keeps_half_where_no_budget_is_given(folder: Path, tmp_path: Path) -> None:
    piped = CliRunner().invoke(
        app,
        ["compress", str(folder), "-", "-o", str(tmp_path / "a.kvfold"), "--method", "knorm",
         "--json"],
        input=PROMPT,
    )  # fmt: skip
    assert piped.exit_code == 0, piped.output
    assert json.loads(piped.stdout)["stats"]["budget"] == "0.5 of the tokens seen"
    assert "give --out" in refused("compress", str(folder), "-", "--method", "knorm")


def test_what_is_no_context_file_is_called_that(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue. " * 9)
    assert "it is no context file; make one with `kvfold compress`" in refused(
        "ask", "m", str(text), "q"
    )
    assert "there is no such file" in refused("info", str(tmp_path / "absent.kvfold"))


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*_: object) -> str:
        warnings.warn("re-routed to sdpa", stacklevel=1)
        return ""

    monkeypatch.setattr("kvfold.cli.methods.defaults", warned)
    assert kvfold_command("methods").stderr == "warning: re-routed to sdpa\n"
