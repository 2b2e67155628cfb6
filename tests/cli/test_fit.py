# SPDX-License-Identifier: Apache-2.0
"""`kvfold fit`: a scorer from files, its report, and what is refused before a model is loaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import kvfold
from tests.helpers.commands import kvfold_command, refused, run_json

PROSE = "It was a quiet evening, and nobody came to the old garden. " * 40


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(PROSE)
    return path


def test_a_scorer_is_fitted_and_used(book, tmp_path):
    out = tmp_path / "scorer.safetensors"
    options = ["--passages", "4", "--words", "80", "--out", str(out)]
    found = run_json("fit", "bundled", str(book), *options)
    assert set(found["held_out"]["overlap"]) == {"0.5", "0.3", "0.2", "0.1"}
    model, tokenizer = kvfold.bundled_model()
    context = kvfold.compress(model, tokenizer, PROSE, f"zap:file={out}", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


def test_filters_are_fitted_and_used(book, tmp_path):
    out = tmp_path / "filters.safetensors"
    options = ["--scorer", "qfilter", "--passages", "4", "--words", "80", "--out", str(out)]
    found = run_json("fit", "bundled", str(book), *options)
    assert 0 < found["least_agreement"] <= found["agreement"] <= 1
    model, tokenizer = kvfold.bundled_model()
    context = kvfold.compress(model, tokenizer, PROSE, f"qfilter:file={out}", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


def test_the_option_that_names_the_file_is_one_for_a_shell(book, tmp_path):
    out = tmp_path / "my $filters.safetensors"
    options = ["--scorer", "qfilter", "--passages", "4", "--words", "80", "--out", str(out)]
    ran = kvfold_command("fit", "bundled", str(book), *options)
    (said,) = re.findall("use it as (.*)", ran.output)
    assert shlex.split(said) == ["--method", f"qfilter:file={out}"]


def test_heads_are_scored_and_used(book, tmp_path):
    out = tmp_path / "heads.safetensors"
    options = ["--scorer", "duo", "--passages", "4", "--words", "80", "--out", str(out)]
    found = run_json("fit", "bundled", str(book), *options)
    assert found["numbers"] == 16 and 0 <= found["agreement"] <= 1
    model, tokenizer = kvfold.bundled_model()
    spec = f"duo:file={out},sinks=4,recent=16"
    context = kvfold.compress(model, tokenizer, PROSE, spec, 0.5)
    assert 0.4 < context.stats().kept_fraction <= 0.5


def test_centres_are_fitted_and_used(book, tmp_path):
    out = tmp_path / "centres.safetensors"
    options = ["--scorer", "triattention", "--passages", "4", "--words", "80", "--out", str(out)]
    found = run_json("fit", "bundled", str(book), *options)
    assert [len(layer) for layer in found["concentration"]] == [8] * 4
    model, tokenizer = kvfold.bundled_model()
    spec = f"triattention:file={out},prompt=counted"
    context = kvfold.compress(model, tokenizer, PROSE, spec, 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


def test_a_codec_is_fitted_and_used(book, tmp_path):
    basis, out = tmp_path / "codec.safetensors", tmp_path / "book.kvfold"
    options = ["--codec", "kvtc", "--passages", "4", "--words", "80", "--out", str(basis)]
    found = run_json("fit", "bundled", str(book), *options)
    assert found["ranks"] == [512, 512] and max(found["left_out"]) < 1e-3
    sizes = {}
    for codec in ("zstd", f"kvtc:file={basis},ratio=4"):
        options = ["--method", "full", "--codec", codec, "--out", str(out), "--force"]
        sizes[codec] = run_json("compress", "bundled", str(book), *options)["bytes"]
        assert run_json("ask", "bundled", str(out), "What?", "--max-new-tokens", "3")
    assert min(sizes.values()) < 0.3 * sizes["zstd"]


def test_a_curve_is_fitted_and_used(book, tmp_path):
    out, score = tmp_path / "curve.safetensors", "snapkv:window=8"
    options = ["--scorer", f"{score} + curve", "--passages", "4", "--words", "80"]
    found = run_json("fit", "bundled", str(book), *options, "--out", str(out))
    assert found["score"] == score and 0 < found["mass_of_equal"]["0.3"] < found["mass"]["0.3"]
    model, tokenizer = kvfold.bundled_model()
    context = kvfold.compress(model, tokenizer, PROSE, f"{score} + curve:file={out}", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


@pytest.mark.slow
def test_a_text_that_is_too_short_is_named(book, tmp_path):
    short, out = tmp_path / "[b]short.txt", tmp_path / "centres.safetensors"
    short.write_text("A few words.")
    options = ["--scorer", "triattention", "--passages", "4", "--words", "80", "--out", str(out)]
    done = kvfold_command("fit", "bundled", str(book), str(short), *options)
    assert done.exit_code == 0 and out.exists()
    assert f"{short} has fewer than 80 words (--words), and is not used\n" in done.stdout
    assert "book.txt has" not in done.output


def test_texts_beyond_the_passages_are_counted_and_the_file_has_the_scorer_s_name(
    book, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    more = [tmp_path / f"{number}.txt" for number in range(4)]
    for path in more:
        path.write_text(Path(book).read_text())
    options = ["--scorer", "triattention", "--passages", "4", "--words", "80"]
    done = kvfold_command("fit", "bundled", str(book), *map(str, more), *options)
    assert done.exit_code == 0 and Path("triattention.safetensors").exists()
    assert "1 of 5 texts give no passage: raise --passages (4)\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--scorer", "kivi + curve"], "a method that scores"),
        (["--scorer", "curve", "--resume"], "leave --resume out"),
        (["--scorer", "qfilter", "--resume"], "leave --resume out"),
        (["--codec", "gzip"], "kvtc is the codec that is fitted"),
        (["--codec", "kvtc", "--resume"], "leave --resume out"),
        (["--codec", "kvtc", "--scorer", "duo"], "no scorer: leave out --scorer"),
        (["--codec", "kvtc", "--scorer", "kvzip"], "no scorer: leave out --scorer"),
        (["--scorer", "snapkv"], "choose kvzip or kvzip_plus"),
        (["--out", "nowhere/a"], "no folder nowhere"),
        (["--out", "."], "cannot write .: it is a folder"),
        (["--words", "9000"], "none has 9000 words"),
    ],
)
def test_what_cannot_be_fitted_is_refused(book, options, reason):
    assert reason in refused("fit", "bundled", str(book), *options)


def test_a_file_that_is_no_fit_is_not_overwritten(book, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    said = refused("fit", "bundled", str(book), "--out", str(weights))
    assert "is not of kvfold" in said and weights.read_bytes() == b"weights"
    context = tmp_path / "a.kvfold"
    kvfold.compress(*kvfold.bundled_model(), PROSE, "knorm", 0.5).save(context)
    before = context.read_bytes()
    for given in (["--force"], []):
        assert "is no fitted file" in refused(
            "fit", "no/model", str(book), "-o", str(context), *given
        )
    partial = tmp_path / "b.partial"
    partial.write_text("my notes")
    options = ["--passages", "4", "--words", "80", "--out", str(tmp_path / "b")]
    assert "is no stopped fit" in refused("fit", "bundled", str(book), *options)
    assert context.read_bytes() == before and partial.read_text() == "my notes"


def test_a_fit_of_another_request_is_replaced_with_force_only(book, tmp_path):
    out = tmp_path / "fit.safetensors"
    options = ["--passages", "4", "--words", "80", "--out", str(out)]
    given = ["fit", "bundled", str(book), *options, "--scorer", "duo"]
    for _ in range(2):  # the same request is answered anew
        assert kvfold_command(*given).exit_code == 0
    before = out.read_bytes()
    for other in (["--seed", "1"], ["--passages", "5"], ["--scorer", "qfilter"]):
        said = refused("fit", "no/model", str(book), *options, "--scorer", "duo", *other)
        assert "is there already, fitted otherwise" in said and "--force" in said
    said = refused(*given, "--dtype", "bfloat16")
    assert "is there already, fitted for float32" in said and out.read_bytes() == before
    assert kvfold_command(*given, "--force", "--scorer", "qfilter").exit_code == 0
    assert out.read_bytes() != before


def test_a_text_is_not_overwritten(book):
    """Refused before a model is loaded."""
    said = refused("fit", "no-such-model", "README.md", str(book), "--out", str(book))
    assert "is read, and would be overwritten: choose another" in said
    assert book.read_text() == PROSE
