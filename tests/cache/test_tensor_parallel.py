# SPDX-License-Identifier: Apache-2.0
"""Two processes that share a model's KV heads: what they write is what one process writes.

In float64, where the order in which ranks add up leaves scores and cosines in the same order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import Method, Needs, Observation, Stages
from kvfold.cache.tensor_parallel import Ranks
from kvfold.contexts.files.cold_rows import SUMS
from kvfold.contexts.files.format import opened, read_header
from kvfold.contexts.files.header import Header
from kvfold.errors import KvfoldError
from kvfold.fitted.of_model import write_fitted
from kvfold.loading import load
from kvfold.methods.base import Measured
from kvfold.observers.stored import KeysBeforeRope, OutputNorms, TokenIds
from tests.helpers.budgets import of_one_model
from tests.helpers.contexts import DOCUMENT, KIVI
from tests.helpers.models import build
from tests.helpers.scorers import random_scorer, zap_of
from tests.helpers.tokenizers import word_tokenizer

# Each process imports and loads for itself.
pytestmark = pytest.mark.slow

RANKS = 2
PIECES = {"compress": "per_chunk", "prefill_chunk": 50}
# Name: specification, budget, options. Ranks whose heads hold different numbers go on in pieces.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "snapkv": ("snapkv", 40, {}),
    "kvzip": ("kvzip", 40, {}),
    "adakv": ("adakv", 40, {}),
    "pyramidkv": ("pyramidkv", 40, {}),
    "adakv of bytes": ("adakv", "50KB", {}),
    "adakv in pieces": ("adakv", 40, PIECES),
    "adakv, packed in pieces": (f"adakv + {KIVI}", 80, PIECES),
    "kvzip of heads": ("kvzip:level=head", 80, {}),
    "d2o": ("d2o", 60, {}),
    "auto": ("auto:tolerance=0.3,measure=true", None, {}),
    "auto in pieces": ("auto:tolerance=0.3", None, PIECES),
    "dbudgetkv": ("dbudgetkv:ranking=attention,keep_layers=none,threshold=0.05", None, {}),
    "simlayerkv": ("simlayerkv:window=30,threshold=0.3", None, {}),
    "packed": (f"snapkv + {KIVI}", "80KB", {}),
    "merged": ("h2o + merge:rule=d2o", 40, {}),
    "fair": ("snapkv + fair:spans=8/30", 40, {}),
    "in rounds": ("adakv + every", 40, {}),
    "moved": ("adakv + chunkwise:length=30 + reindex", 40, {}),
    "recent": ("keydiff + recent", 40, {}),
    "full": ("full", None, {}),
    "h2o": ("h2o", 60, {}),
    "roco": ("roco", 40, {}),
    "knorm": ("knorm", 40, {}),
    "streaming_llm": ("streaming_llm", 40, {}),
    "local_window": ("local_window", 40, {}),
    "think": ("think", None, {}),
    "minicache": ("minicache", None, {}),
    "tova": ("tova:per_head=true", 40, {}),
    "cam": ("cam:deterministic=true", 40, {}),
}
_NAMED = {part.split(":")[0] for spec, _, _ in CASES.values() for part in spec.split(" + ")}
# Every other method that decides by head, with its own options.
CASES |= {
    name: (name, 40 if cls.takes_budget else None, {})
    for name, cls in kvfold.list_methods().items()
    if cls.by_head is True and name == cls.name and name not in _NAMED and not of_one_model(name)
}
# Methods whose entries leave while tokens come, at budgets that the prompt fills, or the answer.
_WRITING = [
    ("adakv:window=8 + every:interval=4", 40),
    ("adakv:window=8 + every:interval=4", 160),
    ("adakv:window=8 + every:interval=4,sizes=again", 40),
    ("rkv + every:interval=4,prompt=kept", 10),
    ("zap:file={}/scorer.safetensors + every:interval=4", 40),
    ("zap:file={}/scorer.safetensors + every:interval=4", 160),
    ("snapkv:window=8 + sizes:file={}/parts.json + every:interval=4", 160),
    ("d2o:decode=append + every:interval=4", 60),
    ("h2o", 60),
    ("sirllm", 40),
    ("sirllm + every:interval=4", 40),
]
WRITING = {f"{spec}, {budget}": (spec, budget) for spec, budget in _WRITING}
# Of a model with two KV heads on each rank: sizes that are measured on the heads of all ranks.
OF_TWO_HEADS: list[tuple[str, Any]] = [
    ("zap_threshold:file={}/two_heads/scorer.safetensors,window=16,threshold=0,interval=4", None),
    ("auto:tolerance=0.3", None),
]
PARTS = [[0.2, 0.5], [0.6, 0.3], [0.4, 0.4], [0.7, 0.1]]
ASKED = ("snapkv", "kvzip", "adakv", "minicache")
QUESTION = "the sky is"
NOT_BY_HEAD = ("tova", "random", "cam", "d2o_official", "snapkv + merge:rule=cam", "pyramidinfer")
# Family and changes of models that ranks cannot share by their KV heads, and why.
UNSHARED: dict[str, tuple[str, dict[str, Any], str]] = {
    "one head": ("llama", {"num_key_value_heads": 1}, "has 1 KV heads, not a multiple of 2"),
    "replicated": ("olmo2", {}, "stores 2 of 2 KV heads, so that some are stored twice"),
    "latents": ("deepseek_v3", {}, "caches latents"),
    "recurrent": ("qwen3_5", {}, "has recurrent layers"),
}


def beyond_attention(seen: Observation) -> Tensor:
    """A score of all that an observation offers beyond entries and attention."""
    outputs = seen.group_mean(seen.output_norms()) if seen.get(OutputNorms) else 0
    return outputs + seen.unrotated()[..., 0] + seen[TokenIds].double().sin()


def as_many_as_high(seen: Observation) -> Tensor:
    """Number of entries `[B]` of more than the mean score, in the mean over all heads."""
    scores = beyond_attention(seen)
    high = scores > scores.mean((1, 2), keepdim=True)
    return high.sum(-1).double().mean(-1).long()


@dataclass(frozen=True)
class ReadsEverything(Method):
    """Keeps entries by their tokens, un-rotated keys and output norms."""

    by_head: ClassVar[bool] = True

    def stages(self) -> Stages:
        needs = Needs(TokenIds(), KeysBeforeRope(), OutputNorms("l2"))
        return Stages(needs=needs, score=beyond_attention)


@dataclass(frozen=True)
class MeasuresEverything(Method):
    """Keeps as many entries as the observation of all heads says."""

    by_head: ClassVar[bool] = True
    takes_budget: ClassVar[bool] = False

    def stages(self) -> Stages:
        needs = Needs(TokenIds(), KeysBeforeRope())
        return Stages(needs=needs, score=beyond_attention, allocate=Measured(as_many_as_high))


OWN = (ReadsEverything(), MeasuresEverything())


def columns_of(cache: kvfold.CompressedCache) -> list[list[list[int]]]:
    """Columns that each layer's heads of the only row keep, `[L][H]`."""
    layers = range(len(cache.states))
    return [[head.tolist() for head in cache.positions(layer)[0]] for layer in layers]


@torch.no_grad()
def kept_while_writing(
    model: Any, tokenizer: Any, folder: Path, spec: str, budget: int | None
) -> list[list[list[list[int]]]]:
    """What is kept after a prompt, an answer, another prompt and another answer."""
    cache = kvfold.compress(model, tokenizer, DOCUMENT, spec.format(folder), budget).cache
    draw = torch.Generator().manual_seed(0)
    answers = torch.randint(3, 12, (2, 1, 13), generator=draw).split(1, -1)
    prompt = torch.randint(3, 12, (1, 12), generator=draw)
    found = [columns_of(cache)]
    for pieces in ([each[0] for each in answers], [prompt], [each[1] for each in answers]):
        for piece in pieces:
            model(piece, past_key_values=cache)
        found.append(columns_of(cache))
    return found


def kept_by(model: Any, tokenizer: Any, method: Method) -> list[list[list[int]]]:
    """Columns that each layer's heads keep, `[L][H]`, of an own method."""
    budget = 40 if method.takes_budget else None
    return columns_of(kvfold.compress(model, tokenizer, DOCUMENT, method, budget).cache)


def joined_heads(of_ranks: list[Any]) -> list[list[list[int]]]:
    """What ranks keep, `[L][H]`, with their heads side by side."""
    return [[head for own in layer for head in own] for layer in zip(*of_ranks, strict=True)]


def compress(model: Any, tokenizer: Any, case: str) -> kvfold.Context:
    spec, budget, options = CASES[case]
    return kvfold.compress(model, tokenizer, DOCUMENT, spec, budget, **options)


def answer(context: kvfold.Context) -> str:
    return context.ask(QUESTION, max_new_tokens=8, suppress_tokens=[0, 1, 2])


def refusal(work: Any, *arguments: Any) -> str:
    try:
        work(*arguments)
    except KvfoldError as refused:
        return str(refused)
    return "not refused"


def work_as_rank(folder: Path) -> None:
    """What each process that torchrun starts does: writes files, and reports what it met."""
    model, tokenizer = load(str(folder / "model"), among_ranks=True)
    asked = json.loads((folder / "asked.json").read_text())
    answers, again = {}, {}
    for case in asked["case"]:
        context = compress(model, tokenizer, case)
        context.save(folder / f"{case}.kvfold")
        if case in ASKED:
            answers[case] = answer(context)
            again[case] = answer(kvfold.load(folder / f"{case}.kvfold", model, tokenizer))
    wide, _ = load(str(folder / "two_heads"), among_ranks=True)
    unshared = {name: load(str(folder / name), among_ranks=True)[0] for name in UNSHARED}
    report = {
        "heads": [layer.stored().keys.shape[1] for layer in context.cache.states],
        "kept": [kept_by(model, tokenizer, method) for method in OWN],
        "writing": {
            spec: kept_while_writing(model, tokenizer, folder, *WRITING[spec])
            for spec in asked["writing"]
        },
        "two heads": [kept_while_writing(wide, tokenizer, folder, *case) for case in OF_TWO_HEADS],
        "answers": answers,
        "again": again,
        "methods": {m: refusal(kvfold.CompressedCache, model, m, *_any(m)) for m in NOT_BY_HEAD},
        "models": {
            name: refusal(kvfold.compress, other, tokenizer, DOCUMENT, "snapkv", 40)
            for name, other in unshared.items()
        },
        "no folder": refusal(context.save, folder / "missing" / "saved.kvfold"),
        "other weights": refusal(kvfold.load, folder / "other.kvfold", model, tokenizer),
    }
    (folder / f"{context.cache.ranks.rank}.json").write_text(json.dumps(report))


def _any(method: str) -> tuple[Any, ...]:
    return (100,) if kvfold.parse(method).takes_budget else ()


def torchrun(*arguments: str) -> str:
    """The standard output of two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(RANKS), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def save_model(path: Path, family: str, **changes: Any) -> None:
    build(family, torch.float64, vocab_size=12, **changes).save_pretrained(path)
    word_tokenizer().save_pretrained(path)


def asked(session: pytest.Session) -> dict[str, list[str]]:
    """Values of the parameters that are called so, in the tests of this file in the session."""
    own = [item for item in session.items if item.path == Path(__file__)]
    of_tests = [item.callspec.params for item in own if hasattr(item, "callspec")]
    known = {"case": CASES, "writing": WRITING}
    return {
        name: [value for value in values if value in [each.get(name) for each in of_tests]]
        for name, values in known.items()
    }


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what two ranks wrote and reported of the cases that this session asks for."""
    pytest.importorskip("accelerate")
    path = tmp_path_factory.mktemp("ranks")
    (path / "asked.json").write_text(json.dumps(asked(request.session)))
    save_model(path / "model", "llama")
    model, _ = load(str(path / "model"), among_ranks=True)
    scorer = random_scorer(model)
    scorer.weights[0] = 0  # there entries of one token score alike but for rounding
    write_fitted(path / "scorer.safetensors", scorer, model, written_by="", target="kvzip", texts=0)
    save_model(path / "two_heads", "llama", num_key_value_heads=2 * RANKS)
    zap_of(load(str(path / "two_heads"), among_ranks=True)[0], path / "two_heads")
    (path / "parts.json").write_text(json.dumps(PARTS))
    for name, (family, changes, _) in UNSHARED.items():
        save_model(path / name, family, **changes)
    other = build("llama", torch.float64, vocab_size=12, seed=1)
    kvfold.compress(other, word_tokenizer(), DOCUMENT, "snapkv", 40).save(path / "other.kvfold")
    torchrun("-m", "tests.cache.test_tensor_parallel", str(path))
    return path


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, Any]]:
    """Of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Any, Any]:
    """The same model and tokenizer in this process."""
    return load(str(folder / "model"), among_ranks=True)


def contents(path: Path) -> tuple[Header, dict[str, Tensor]]:
    with opened(path) as file:
        header = file.header.model_copy(update={"checksums": {}})
        return header, {name: file.tensor(name) for name in file.header.checksums}


def assert_same_file(one: Path, other: Path) -> None:
    """The same entries in all heads, whose values differ by rounding only."""
    (header, mine), (their_header, theirs) = contents(one), contents(other)
    assert header == their_header
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-9, equal_nan=True)
        elif SUMS not in name:  # of rows that differ by rounding; checked when they are read
            assert torch.equal(theirs[name], tensor), name


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", CASES)
def test_ranks_write_the_file_of_one_process(
    case: str, folder: Path, alone: tuple[Any, Any], tmp_path: Path
) -> None:
    compress(*alone, case).save(tmp_path / "one.kvfold")
    assert_same_file(tmp_path / "one.kvfold", folder / f"{case}.kvfold")


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", ASKED)
def test_ranks_answer_as_one_process_does(
    case: str, folder: Path, reports: list[dict[str, Any]], alone: tuple[Any, Any]
) -> None:
    expected = answer(compress(*alone, case))
    assert expected
    for report in reports:
        assert report["answers"][case] == report["again"][case] == expected
    assert answer(kvfold.load(folder / f"{case}.kvfold", *alone)) == expected


def test_each_rank_holds_its_own_heads(reports: list[dict[str, Any]]) -> None:
    assert [report["heads"] for report in reports] == [[1] * 4] * RANKS


@pytest.mark.parametrize("number", range(2))
def test_ranks_observe_what_one_process_does(
    number: int, reports: list[dict[str, Any]], alone: tuple[Any, Any]
) -> None:
    together = joined_heads([report["kept"][number] for report in reports])
    assert together == kept_by(*alone, OWN[number])


@pytest.mark.cases(2)
@pytest.mark.parametrize("writing", WRITING)
def test_ranks_evict_while_writing_as_one_process_does(
    writing: str, folder: Path, reports: list[dict[str, Any]], alone: tuple[Any, Any]
) -> None:
    expected = kept_while_writing(*alone, folder, *WRITING[writing])
    of_ranks = zip(*(report["writing"][writing] for report in reports), strict=True)
    assert [joined_heads(list(each)) for each in of_ranks] == expected


@pytest.mark.parametrize("number", range(len(OF_TWO_HEADS)), ids=[s for s, _ in OF_TWO_HEADS])
def test_ranks_of_two_heads_each_measure_what_one_process_does(
    number: int, folder: Path, reports: list[dict[str, Any]]
) -> None:
    alone = load(str(folder / "two_heads"), among_ranks=True)
    expected = kept_while_writing(*alone, folder, *OF_TWO_HEADS[number])
    of_ranks = zip(*(report["two heads"][number] for report in reports), strict=True)
    assert [joined_heads(list(each)) for each in of_ranks] == expected
    assert len({len(head) for head in expected[0][0]}) > 1


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", ["adakv", "kvzip", "adakv in pieces", "auto in pieces"])
def test_heads_of_different_ranks_share_one_budget(case: str, folder: Path) -> None:
    kept = [part.kept for part in read_header(folder / f"{case}.kvfold").layers]
    assert any(of_first != of_second for of_first, of_second in kept)


@pytest.mark.parametrize("method", NOT_BY_HEAD)
def test_methods_that_see_all_heads_at_once_are_refused(
    method: str, reports: list[dict[str, Any]]
) -> None:
    for report in reports:
        assert "may have to see all KV heads at once" in report["methods"][method]


@pytest.mark.parametrize("name", UNSHARED)
def test_models_that_ranks_do_not_share_by_head_are_refused(
    name: str, reports: list[dict[str, Any]]
) -> None:
    for report in reports:
        assert UNSHARED[name][2] in report["models"][name]


def test_all_ranks_learn_what_the_first_cannot_write(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["no folder"].startswith("cannot write")


def test_ranks_compare_all_weights(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "the same configuration, but other weights" in report["other weights"]


def test_one_process_changes_no_stage() -> None:
    stages = kvfold.parse("pyramidkv + adakv").stages()
    assert Ranks().joining(stages) is stages


@pytest.mark.whole
def test_the_command_under_torchrun(folder: Path, tmp_path: Path, alone: tuple[Any, Any]) -> None:
    document, written = tmp_path / "document.txt", tmp_path / "two.kvfold"
    document.write_text(DOCUMENT)
    options = ("--method", "adakv", "--budget", "40", "--out", str(written))
    shown = torchrun("-m", "kvfold", "compress", str(folder / "model"), str(document), *options)
    assert shown.count("kept of all entries") == 1
    compress(*alone, "adakv").save(tmp_path / "one.kvfold")
    assert_same_file(tmp_path / "one.kvfold", written)


if __name__ == "__main__":
    work_as_rank(Path(sys.argv[1]))
