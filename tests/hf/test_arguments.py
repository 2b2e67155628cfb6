# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of public functions: each is refused in a line that names the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from tests.helpers.commands import kvfold_command, refused


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return kvfold.bundled_model()


@pytest.fixture(scope="module")
def context(pair: tuple[Any, Any]) -> kvfold.Context:
    return kvfold.compress(*pair, "The gate opens at noon. " * 8, "snapkv", 0.5)


SWAPPED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda m, t: kvfold.compress(t, m, "A text."),
        "the model comes first: compress(model, tokenizer, document)",
    ),
    (lambda m, t: kvfold.compress(m, "A text.", t), "the tokenizer comes second: compress("),
    (lambda m, t: kvfold.compress("bundled", t, "A text."), "not 'bundled': load it first"),
    (lambda m, t: kvfold.compress(m, t, "A text.", 0.5), "a method is a text"),
    (lambda m, t: kvfold.load(m, t, "a.kvfold"), "the path comes first: load(path, model, "),
    (lambda m, t: kvfold.load("a.kvfold", t, m), "the model comes second: load("),
    (lambda m, t: kvfold.load_session(m, t, "a.kvfold"), "the path comes first: load_session("),
    (lambda m, t: kvfold.generate(t("Hi", return_tensors="pt").input_ids, m), "comes first: gen"),
    (lambda m, t: kvfold.enable(t, m), "the model comes first: enable(model, method, budget)"),
    (lambda m, t: kvfold.disable(t), "the model comes first: disable(model)"),
    (lambda m, t: kvfold.CompressedCache("snapkv", m, 0.5), "first: CompressedCache(model, method"),
    (lambda m, t: kvfold.span(m, "A text.", "text"), "the tokenizer comes first: span(tokenizer"),
    (lambda m, t: kvfold.span("A text.", "text", t), "the tokenizer comes first: span(tokenizer"),
    (lambda m, t: kvfold.check(t, m, ["A.", "B."], "snapkv"), "the model comes first: check("),
    (lambda m, t: kvfold.begin_session(t, m, "Be brief."), "the model comes first: begin_session("),
    (lambda m, t: kvfold.evaluate(t, m, "niah", "snapkv"), "the model comes first: evaluate("),
    (lambda m, t: kvfold.fit_scorer(t, m, ["A."], "x"), "the model comes first: fit_scorer("),
]


@pytest.mark.parametrize("number", range(len(SWAPPED)))
def test_arguments_out_of_order_are_named(pair: tuple[Any, Any], number: int) -> None:
    call, said = SWAPPED[number]
    with pytest.raises(KvfoldError) as refusal:
        call(*pair)
    assert said in str(refusal.value)


def test_keywords_of_another_library_are_named(
    pair: tuple[Any, Any], context: kvfold.Context
) -> None:
    model, tokenizer = pair
    with pytest.raises(KvfoldError, match=r"budget is the part kept: budget=0\.6$"):
        kvfold.compress(model, tokenizer, "A text.", compression_ratio=0.4)  # type: ignore[call-arg]
    with pytest.raises(KvfoldError, match=r"budget is the part kept: budgets=0\.7$"):
        kvfold.check(model, tokenizer, ["A.", "B."], "snapkv", compression_ratio=0.3)  # type: ignore[call-arg]
    with pytest.raises(KvfoldError, match=r"budget is the part kept: budget=0\.6$"):
        kvfold.enable(model, "snapkv", ratio=0.4)  # type: ignore[call-arg]
    with pytest.raises(KvfoldError, match=r"budget is the part kept: budget=0\.6$"):
        kvfold.CompressedCache(model, "snapkv", compression_ratio=0.4)  # type: ignore[call-arg]
    with pytest.raises(KvfoldError, match=r'the method is a text: method="snapkv"$'):
        kvfold.compress(model, tokenizer, "A text.", press="SnapKVPress")  # type: ignore[call-arg]
    ids = tokenizer("Hello there", return_tensors="pt").input_ids
    with pytest.raises(KvfoldError, match=r"kvfold\.CompressedCache\(model, budget=0\.6\)$"):
        kvfold.generate(model, ids, compression_ratio=0.4)
    with pytest.raises(KvfoldError, match="leave it out"):
        context.ask("When?", press="SnapKVPress")
    with pytest.raises(KvfoldError, match="leave it out"):
        next(context.stream("When?", compression_ratio=0.4))
    with pytest.raises(KvfoldError, match=r"budget=0\.6$"):
        context.chat(compression_ratio=0.4)  # type: ignore[call-arg]


def test_keywords_of_the_prompt_are_named(pair: tuple[Any, Any], context: kvfold.Context) -> None:
    model, tokenizer = pair
    for given, said in (
        ({"system_prompt": "a"}, "write system=$"),
        ({"chat_template_kwargs": {}}, "write template=$"),
        ({"enable_thinking": False}, r"write template=\{'enable_thinking': '…'\}$"),
    ):
        with pytest.raises(KvfoldError, match=said):
            kvfold.compress(model, tokenizer, "A text.", **given)  # type: ignore[arg-type]
    for call in (context.ask, context.chat().ask, context.chat):
        for name in ("system", "tools", "enable_thinking"):
            with pytest.raises(KvfoldError, match=f"{name}= is no argument here"):
                call("When?", **{name: "a"})  # type: ignore[operator]
    with pytest.raises(KvfoldError, match=r"write max_new_tokens=$"):
        context.ask("When?", max_tokens=5)
    with pytest.raises(KvfoldError, match="does not read 'nope'"):
        context.ask("When?", template={"nope": 1})
    with pytest.raises(KvfoldError, match="names and values"):
        context.ask("When?", template="nope")  # type: ignore[arg-type]
    with pytest.raises(KvfoldError, match="say it there"):
        kvfold.begin_session(model, tokenizer, "Be brief.", system="a")  # type: ignore[call-arg]
    with pytest.raises(KvfoldError, match="apply_chat_template"):
        kvfold.generate(model, tokenizer("a", return_tensors="pt").input_ids, tools=[])


def test_a_budget_and_a_method_belong_to_the_cache(
    pair: tuple[Any, Any], context: kvfold.Context
) -> None:
    session = kvfold.begin_session(*pair, "The gate opens at noon. " * 8, budget=400)
    for ask in (context.ask, context.chat().ask, session.ask):
        for name, value in (("budget", 0.5), ("method", "snapkv"), ("press", "SnapKV")):
            with pytest.raises(KvfoldError, match=f"{name}= is no argument here; .* leave it out"):
                ask("When?", **{name: value})
    ids = pair[1]("Hello there", return_tensors="pt").input_ids
    with pytest.raises(KvfoldError, match=r"kvfold\.CompressedCache\(model, budget=0\.5\)$"):
        kvfold.generate(pair[0], ids, budget=0.3)


NO_COUNTS = (0, -1, 2.5, float("nan"), "8", b"8", [8], np.array([1, 2]), np.float32(8), object())


def test_counts_texts_and_template_arguments_of_another_type_are_named(
    pair: tuple[Any, Any], context: kvfold.Context
) -> None:
    ids = pair[1]("Hello there", return_tensors="pt").input_ids
    for given in NO_COUNTS:
        with pytest.raises(KvfoldError, match="max_new_tokens is a whole number from 1 on"):
            context.ask("When?", max_new_tokens=given)
        with pytest.raises(KvfoldError, match="max_new_tokens is a whole number from 1 on"):
            cache = kvfold.CompressedCache(pair[0], "snapkv", 0.5)
            kvfold.generate(pair[0], ids, cache=cache, max_new_tokens=given)
    for given in NO_COUNTS[1:]:
        with pytest.raises(KvfoldError, match="turns is a whole number from 1 on"):
            context.chat().drop(given)
    for given in (3, b"x", [1], Path("x"), object()):
        with pytest.raises(KvfoldError, match="stop takes a text or a list of texts"):
            context.ask("When?", stop=given)
    for given in ("enable_thinking=false", 3, [("a", 1)], np.array([1, 2])):
        with pytest.raises(KvfoldError, match="names and values"):
            context.ask("When?", template=given)
        with pytest.raises(KvfoldError, match="names and values"):
            kvfold.compress(*pair, "A text.", "snapkv", 0.9, template=given)  # type: ignore[arg-type]
    said = context.ask("When?", max_new_tokens=4)
    assert said == context.ask("When?", max_new_tokens=np.int64(4), stop=None)
    assert said == context.ask("When?", max_new_tokens=torch.tensor(4))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": "8"}, "tokens is a whole number from 1 on, not '8'"),
        ({"tokens": 2.5}, "tokens is a whole number from 1 on, not 2.5"),
        ({"tolerance": None}, "the tolerance is None"),
        ({"tolerance": "0.1"}, "the tolerance is '0.1'"),
        ({"prompts": None}, "prompts are a file, a folder, or a list"),
        ({"prompts": [1, 2]}, "prompts are a file, a folder, or a list"),
    ],
)
def test_what_a_check_cannot_measure_is_named(
    pair: tuple[Any, Any], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(KvfoldError) as refusal:
        kvfold.check(*pair, **{"prompts": ["A.", "B."], "methods": "snapkv"} | wrong)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": 3}, "tasks are texts, not 3"),
        ({"tasks": ["niah", None]}, "tasks are texts, not a list"),
        ({"max_length": "many"}, "max_length is a whole number"),
        ({"samples": 0}, "samples is a whole number from 1 on, not 0"),
        ({"batch_size": 0.5}, "batch_size is a whole number"),
        ({"lengths": [64, "128"]}, "lengths is a whole number"),
        ({"haystack": 7}, "not 7"),
        ({"data": ""}, "the file's name is empty"),
    ],
)
def test_what_no_evaluation_can_take_is_named(
    pair: tuple[Any, Any], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(KvfoldError) as refusal:
        kvfold.evaluate(*pair, **{"tasks": "niah_magic", "methods": "knorm", "budgets": 9} | wrong)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "given", [3, b"x", ["a"], {}, object(), len, str, np.array([1])], ids=lambda x: type(x).__name__
)
def test_what_is_no_tokenizer_is_named(
    pair: tuple[Any, Any], context: kvfold.Context, given: Any, tmp_path: Path
) -> None:
    context.save(tmp_path / "a.kvfold")
    for call in (
        lambda: kvfold.load(tmp_path / "a.kvfold", pair[0], given),
        lambda: kvfold.compress(pair[0], given, "A text."),
        lambda: kvfold.begin_session(pair[0], given, "A text."),
        lambda: kvfold.span(given, "A text.", "text"),
    ):
        with pytest.raises(KvfoldError, match=r"the tokenizer comes (first|second|third)"):
            call()
    with pytest.raises(KvfoldError, match="give a list of at least two contexts"):
        kvfold.join(given)
    with pytest.raises(KvfoldError, match="the model comes first: image_spans"):
        kvfold.image_spans(given, given)


def test_names_that_no_file_can_have_are_refused(
    pair: tuple[Any, Any], context: kvfold.Context
) -> None:
    for path in ("a\0b", "a\ud800b", Path("a\0b")):
        with pytest.raises(KvfoldError, match="no file can have the name"):
            context.save(path)
        with pytest.raises(KvfoldError, match="no file can have the name"):
            kvfold.load(path, *pair)
        with pytest.raises(KvfoldError, match="no file can have the name"):
            kvfold.check(*pair, ["A.", "B."], "snapkv", out=path)
    with pytest.raises(KvfoldError, match="the file's name is empty"):
        kvfold.evaluate(*pair, "niah_magic", "snapkv", 0.5, out="")


@pytest.mark.slow
def test_a_file_s_name_is_no_document(pair: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "contract.txt"
    path.write_text("The gate opens at noon.")
    for given in (path, str(path)):
        with pytest.raises(KvfoldError, match=r"this is a file's name: .*contract\.txt"):
            kvfold.compress(*pair, given, "snapkv", 0.9)  # type: ignore[arg-type]
        with pytest.raises(KvfoldError, match=r"this is a file's name: .*contract\.txt"):
            kvfold.begin_session(*pair, given)  # type: ignore[arg-type]
    missing = str(tmp_path / "another.txt")
    assert kvfold.compress(*pair, missing, "snapkv", 0.9).ids.shape[1] > 0


def test_a_file_whose_text_is_a_file_s_name_is_compressed(tmp_path: Path) -> None:
    path, out = tmp_path / "list.txt", tmp_path / "list.kvfold"
    path.write_text(str(path))
    done = kvfold_command("compress", "bundled", str(path), "--method", "snapkv", "--out", str(out))
    assert done.exit_code == 0, done.output


def test_empty_names_of_files_are_refused(pair: tuple[Any, Any], context: kvfold.Context) -> None:
    for path in ("", " "):
        with pytest.raises(KvfoldError, match="the file's name is empty"):
            context.save(path)
        with pytest.raises(KvfoldError, match="the file's name is empty"):
            kvfold.load(path, *pair)
    with pytest.raises(KvfoldError, match="the path comes first: save"):
        context.save(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "bundled", "--ratio", "0.4"), "budget is the part kept, --budget 0.6"),
        (("compress", "bundled", "x", "--compression-ratio=0.4"), "the part kept, --budget 0.6"),
        (("eval", "--ratio", "0.4"), "--budgets 0.6"),
        (("eval", "--press", "snapkv"), "methods have names, --methods snapkv"),
        (("inspect", "bundled", "--press", "snapkv"), "snapkv"),
        (
            ("ask", "bundled", "a.kvfold", "Why?", "--system", "a"),
            "it was chosen by kvfold compress",
        ),
        (("run", "bundled", "--buget", "0.4"), "--buget"),
        (("run", "bundled", "--budget"), "--budget"),
        (("run", "bundled", "--dtype", "int8"), "--dtype"),
        (("compress", "bundled"), "kvfold compress -h"),
        (("compres", "bundled"), "compres"),
        (("--foo", "run"), "No such option: --foo (see kvfold -h)"),
    ],
)
def test_wrong_options_are_told_in_a_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)
