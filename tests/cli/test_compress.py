# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress`: half where no budget is given; other files are refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvfold
from kvfold.bundled import FOLDER
from kvfold.cli import app
from tests.helpers.chats import TEMPLATE
from tests.helpers.commands import refused
from tests.helpers.contexts import assert_same
from tests.helpers.tokenizers import PROMPT, tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


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


def test_the_command_that_asks_is_one_for_a_shell(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "it's [bold]$HOME é.txt"
    text.write_text(PROMPT)
    ran = CliRunner().invoke(app, ["compress", str(folder), str(text), "--method", "knorm"])
    (said,) = re.findall(r"ask it with `(.*)`\.", ran.output)
    file = str(text.with_suffix(".kvfold"))
    assert shlex.split(said) == ["kvfold", "ask", str(folder), file, "QUESTION"]


def test_a_system_message_and_arguments_are_held_by_the_file_and_asked_with(
    folder: Path, tmp_path: Path
) -> None:
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(folder, model)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% if short %}blue {% endif %}" + TEMPLATE
    tokenizer.save_pretrained(model)
    text.write_text(PROMPT)
    given = [str(model), str(text), "--method", "knorm", "--json", "--system", "the sky"]
    ran = CliRunner().invoke(app, ["compress", *given, "--template", "short=True"])
    assert ran.exit_code == 0, ran.output
    file = str(text.with_suffix(".kvfold"))
    shown = json.loads(CliRunner().invoke(app, ["info", file, "--json"]).stdout)
    assert (shown["system"], shown["arguments"]) == ("the sky", {"short": True})
    assert shown["before"].startswith("blue <system> the sky </s>")
    table = CliRunner().invoke(app, ["info", file]).stdout
    assert "the sky" in table and "template's short" in table
    ask = ["ask", str(model), file, "go", "--max-new-tokens", "2"]
    assert CliRunner().invoke(app, [*ask, "--template", '{"short": true}']).exit_code == 0
    assert "other arguments" in refused(*ask, "--template", "short=false")
    elsewhere = ("--template", "long=1", "--out", str(tmp_path / "other.kvfold"))
    assert "does not read 'long'" in refused("compress", *given, *elsewhere)
    run = ["run", str(model), "--prompt", "go", "--method", "full", "--system", "the sky"]
    assert CliRunner().invoke(app, [*run, "--template", "short=1", "--json"]).exit_code == 0
    for wrong in ("short", "=1", "{short}"):
        assert "--template" in refused("compress", *given, "--template", wrong)


def test_several_budgets_are_several_files_from_one_reading(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    given = ["compress", str(folder), str(text), "--method", "knorm", "--json"]
    ran = CliRunner().invoke(app, [*given, "--budgets", "0.5,20%,6", "--keep-scores"])
    assert ran.exit_code == 0, ran.output
    made = json.loads(ran.stdout)
    assert [Path(each["file"]).name for each in made] == [
        "text-0.5.kvfold", "text-20%.kvfold", "text-6.kvfold",
    ]  # fmt: skip
    model, tokenizer = tiny_llama(), word_tokenizer()
    contexts = [kvfold.load(each["file"], model, tokenizer) for each in made]
    for context, budget in zip(contexts, (0.5, 0.2, 6), strict=True):
        alone = kvfold.compress(model, tokenizer, PROMPT, "knorm", budget, keep_scores=True)
        assert_same(context.cache, alone.cache)
    assert_same(contexts[0].shrink(0.2).cache, contexts[1].cache)


@pytest.mark.slow
def test_budgets_that_do_not_go_together_are_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    given = ["compress", str(folder), str(text), "--budgets", "0.5,0.2"]
    assert "for one document" in refused(*given, "--budget", "0.3")
    assert "for one document" in refused(*given, str(text))
    assert "leave out --budgets" in refused(
        *given, "--method", "knorm", "--compress", "per_chunk", "--prefill-chunk", "8"
    )
    assert "at least one budget" in refused(*given[:3], "--budgets", ",")
    assert "leave out keep_scores" in refused(*given, "--method", "adakv", "--keep-scores")


def test_what_is_no_context_file_is_called_that(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue. " * 9)
    assert "it is no context file; make one with `kvfold compress`" in refused(
        "ask", "m", str(text), "q"
    )
    assert "there is no such file" in refused("info", str(tmp_path / "absent.kvfold"))


def test_levelled_files_hold_one_set_and_what_it_changes(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "a.kvfold"
    text.write_text(PROMPT)
    given = ["compress", str(folder), str(text), "-o", str(out), "--method", "kvzip", "--budget"]
    ran = CliRunner().invoke(app, [*given, "8", "--level", "votes", "--json"])
    assert ran.exit_code == 0, ran.output
    level = json.loads(ran.stdout)["level"]
    model, tokenizer = tiny_llama(), word_tokenizer()
    loaded = kvfold.load(out, model, tokenizer)
    assert loaded.level is not None and loaded.level.model_dump() == level
    alone = kvfold.compress(model, tokenizer, PROMPT, "kvzip", 8).levelled("votes")
    assert_same(loaded.cache, alone.cache)
    shown = CliRunner().invoke(app, [*given, "8", "--level", "mass", "--force"])
    assert shown.exit_code == 0 and "mean KL to that" in shown.output


def test_a_context_file_is_levelled_into_another(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), word_tokenizer()
    uneven = kvfold.compress(model, tokenizer, PROMPT, "kvzip", 8)
    source, out = tmp_path / "a.kvfold", tmp_path / "b.kvfold"
    uneven.save(source)
    before = source.read_bytes()
    given = ["compress", str(folder), str(source), "--level", "union"]
    ran = CliRunner().invoke(app, [*given, "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    loaded, expected = kvfold.load(out, model, tokenizer), uneven.levelled("union")
    assert loaded.level == expected.level and source.read_bytes() == before
    assert_same(loaded.cache, expected.cache)
    for wrong, said in (
        (given, "name the other file"),
        ([*given, "--out", str(source)], "stays as it is"),
        (given[:3], "a method and a budget of its own"),
        ([*given, "--budget", "4", "--out", str(out)], "a method and a budget of its own"),
        ([*given, str(source), "--out", str(out)], "name one context file"),
        ([*given[:2], "t.txt", str(source), "--method", "snapkv"], f"error: {source} holds a"),
    ):
        assert said in refused(*wrong)


def test_heads_keep_whole_pages_of_a_text(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "a.kvfold"
    text.write_text(PROMPT)
    given = ["compress", str(folder), str(text), "-o", str(out), "--method", "kvzip"]
    given += ["--budget", "8", "--pages", "2"]
    ran = CliRunner().invoke(app, [*given, "--json"])
    assert ran.exit_code == 0, ran.output
    model, tokenizer = tiny_llama(), word_tokenizer()
    alone = kvfold.compress(model, tokenizer, PROMPT, "kvzip + pages:size=2", 8)
    assert_same(kvfold.load(out, model, tokenizer).cache, alone.cache)
    assert "level" not in json.loads(ran.stdout)
    assert CliRunner().invoke(app, given).exit_code == 0  # as before
    said = refused(*given[:-1], "3")
    assert "made with method kvzip" in said and "replace it with --force" in said


def test_a_context_file_is_read_again_into_pages(folder: Path, tmp_path: Path) -> None:
    """Also one with pages of another size."""
    model, tokenizer = tiny_llama(), word_tokenizer()
    source, out = tmp_path / "a.kvfold", tmp_path / "b.kvfold"
    given = ["compress", str(folder), str(source), "--out", str(out), "--pages"]
    expected = kvfold.compress(model, tokenizer, PROMPT, "kvzip + pages:size=2", 8)
    for method in ("kvzip", "kvzip + pages:size=3"):
        uneven = kvfold.compress(model, tokenizer, PROMPT, method, 8)
        uneven.save(source)
        assert_same(uneven.paged(2).cache, expected.cache)
        out.unlink(missing_ok=True)
        for _ in range(2):  # the second finds the same
            ran = CliRunner().invoke(app, [*given, "2"])
            assert ran.exit_code == 0, ran.output
        assert_same(kvfold.load(out, model, tokenizer).cache, expected.cache)
        assert "of another request: replace it with --force" in refused(*given, "3")
    kvfold.compress(model, tokenizer, PROMPT * 2, "kvzip", 8).save(source)
    assert "of another request" in refused(*given, "2")
    assert CliRunner().invoke(app, [*given, "2", "--force"]).exit_code == 0


def test_pages_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """Before a model is loaded."""
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    given = ["compress", "no-such-model", str(text), "--budget", "0.5", "--pages"]
    assert "evicts one for each generated token" in refused(*given, "2", "--method", "h2o")
    assert "pages and pages:size=2 both" in refused(*given, "2", "--method", "kvzip + pages")
    assert "choose one" in refused(*given, "2", "--level", "mass")
    file = ["compress", "no-such-model", "a.kvfold", "--out", "b.kvfold", "--pages", "2"]
    assert "choose one" in refused(*file, "--level", "mass")
    assert "--pages" in refused(*given, "0")


@pytest.mark.parametrize("shape", [("--level", "mass"), ("--pages", "2")], ids=" ".join)
@pytest.mark.parametrize(
    "given",
    [
        ("--method", "snapkv"),
        ("--method", "kvzip"),  # the default, but it was given
        ("--budget", "4"),
        ("--budgets", "0.5,0.3"),
        ("--keep-scores",),
        ("--encoding", "latin-1"),
        ("--compress", "at_end"),
        ("--seed", "3"),
        ("--ray", "auto"),
        ("--special-tokens",),
        ("--allow-longer",),
    ],
    ids=" ".join,
)
def test_options_that_a_context_file_fixes_are_refused(
    given: tuple[str, ...], shape: tuple[str, ...]
) -> None:
    said = refused("compress", "no-model", "a.kvfold", *shape, "-o", "b.kvfold", *given)
    assert said.startswith(
        "error: a context file is read again by a method and a budget of its own"
    )
    assert said.endswith(f": leave out {given[0]}")


def test_a_document_is_not_overwritten(tmp_path: Path) -> None:
    text, link, other = (tmp_path / name for name in ("doc.txt", "link.txt", "doc-0.5.txt"))
    text.write_text(PROMPT)
    other.write_text(PROMPT)
    link.symlink_to(text)
    given = ["compress", "no-such-model", "--method", "knorm"]
    for arguments in (
        [str(text), "--out", str(text)],
        [str(text), "--out", str(link)],
        [str(link), "--out", f"{tmp_path}/../{tmp_path.name}/doc.txt"],
        [str(other), "--out", str(text), "--budgets", "0.3,0.5"],
    ):
        assert "is read, and would be overwritten: choose another" in refused(*given, *arguments)
    assert text.read_text() == other.read_text() == PROMPT


def test_a_file_of_the_method_is_not_overwritten(tmp_path: Path) -> None:
    text, scorer = tmp_path / "doc.txt", tmp_path / "scorer.safetensors"
    text.write_text(PROMPT)
    shutil.copy(FOLDER / scorer.name, scorer)
    given = ["compress", "no-such-model", str(text), "--method", f"zap:file={scorer}"]
    said = refused(*given, "--budget", "0.5", "--out", str(scorer))
    assert f"{scorer} is read, and would be overwritten" in said


def test_what_cannot_be_levelled_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    given = ["compress", "no-such-model", str(text), "--level", "mass", "--budget", "0.5"]
    assert "evict while" in refused(*given, "--method", "h2o")
    assert "leave per_chunk and scores out" in refused(*given, "--method", "knorm", "--keep-scores")
    assert "for one document" in refused(*given[:5], "--budgets", "0.5,0.2", "--method", "knorm")


@pytest.mark.parametrize("method", ["recall", "snapkv + recall"])
def test_a_codec_for_recall_is_refused_before_a_model_is_loaded(
    tmp_path: Path, method: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    given = ["compress", "no-such-model", str(text), "--method", method]
    assert "leave out codec= (--codec)" in refused(*given, "--codec", "zstd")
    assert "leave out keep_scores (--keep-scores)" in refused(*given, "--keep-scores")


def test_one_document_goes_into_a_folder_as_several_do(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "one.txt", tmp_path / "contexts"
    text.write_text(PROMPT)
    out.mkdir()
    words = ["compress", str(folder), str(text), "--method", "knorm", "--out", str(out)]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert [path.name for path in out.iterdir()] == ["one.kvfold"]


def test_a_file_that_another_request_made_is_replaced_by_force_only(
    folder: Path, tmp_path: Path
) -> None:
    text, other, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "a.kvfold"
    text.write_text(PROMPT)
    other.write_text(PROMPT + PROMPT)
    given = ["compress", str(folder), "--out", str(out), "--method"]
    assert CliRunner().invoke(app, [*given, "knorm", str(text)]).exit_code == 0
    first = out.read_bytes()
    assert CliRunner().invoke(app, [*given, "knorm", str(text)]).exit_code == 0  # as before
    for changed, said in (
        (["keydiff", str(text)], "made with method knorm"),
        (["knorm", str(text), "--budget", "0.3"], "made with budget 0.5 of the tokens seen"),
        (["knorm", str(other)], "made of other tokens than the document has now"),
    ):
        message = refused(*given, *changed)
        assert said in message and "replace it with --force" in message
        assert out.read_bytes() == first
    assert CliRunner().invoke(app, [*given, "keydiff", str(other), "--force"]).exit_code == 0
    assert out.read_bytes() != first


def test_several_budgets_and_levels_replace_by_force_only(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "a.kvfold"
    text.write_text(PROMPT)
    given = ["compress", str(folder), str(text), "--budgets", "0.5,6", "--method"]
    assert CliRunner().invoke(app, [*given, "knorm"]).exit_code == 0
    assert CliRunner().invoke(app, [*given, "knorm"]).exit_code == 0
    assert "a-0.5.kvfold is there already" in refused(*given, "keydiff")
    assert CliRunner().invoke(app, [*given, "keydiff", "--force"]).exit_code == 0
    assert CliRunner().invoke(app, ["compress", str(folder), str(text)]).exit_code == 0
    level = ["compress", str(folder), str(out), "--out", str(tmp_path / "level.kvfold"), "--level"]
    for _ in range(2):
        ran = CliRunner().invoke(app, [*level, "mass"])
        assert ran.exit_code == 0, ran.output
    assert "of another request: replace it with --force" in refused(*level, "votes")
    assert CliRunner().invoke(app, [*level, "votes", "--force"]).exit_code == 0


def test_no_force_replaces_a_file_that_is_not_of_kvfold(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "notes.md"
    text.write_text(PROMPT)
    out.write_text("my notes")
    given = ["compress", str(folder), str(text), "--method", "knorm", "--out", str(out)]
    for options in ([], ["--force"]):
        assert "notes.md is not of kvfold" in refused(*given, *options)
    assert out.read_text() == "my notes"
    out.write_text("my notes on kvfold")
    for options in ([], ["--force"], ["--budgets", "0.5", "--force"]):
        if "--budgets" in options:
            out = out.rename(tmp_path / "notes-0.5.md")
        assert "is no context file" in refused(*given, *options)
    assert out.read_text() == "my notes on kvfold"
    (tmp_path / "notes.md").touch()
    assert CliRunner().invoke(app, given).exit_code == 0
