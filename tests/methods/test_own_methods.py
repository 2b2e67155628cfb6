# SPDX-License-Identifier: Apache-2.0
"""Methods that are not kvfold's own: the page's example, what registers them, what is refused."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import (
    CompressedCache,
    ContextFileError,
    Forced,
    KvfoldError,
    Method,
    Needs,
    Observation,
    SnapKV,
    Stages,
    parse,
    register,
)
from kvfold.jobs import executor as workers
from kvfold.methods import registry
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.select.top import top
from kvfold.methods.stages.when import Rounds, when_of
from kvfold.observers.last_queries import LastQueries
from kvfold.observers.stored import PreviousScores
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.models import build, prompts
from tests.helpers.registry import registry_restored
from tests.helpers.tokenizers import PROMPT, tiny_llama, word_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "own-methods.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers and imports is gone after it."""
    with registry_restored("vatp", "empty", "broken", "twice"):
        yield


@pytest.fixture
def vatp(tmp_path: Path) -> Path:
    """The page's example, as a file."""
    path = tmp_path / "vatp.py"
    path.write_text(EXAMPLE)
    return path


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model, saved."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return str(path)


@torch.no_grad()
def read(model, method: Method | str, ids: Tensor, budget: int | None = 40) -> CompressedCache:
    cache = CompressedCache(model, method, budget)
    model(ids, past_key_values=cache)
    return cache


# --- the page ------------------------------------------------------------------------------------


def test_the_page_shows_a_method_of_about_thirty_lines():
    assert 25 <= len(EXAMPLE.splitlines()) <= 35


def test_the_pages_method_keeps_what_it_says(vatp, model):
    registry.import_methods(str(vatp))
    ids, window, sinks, budget = prompts((64,))[0], 8, 4, 24
    cache = read(model, f"vatp:window={window}", ids, budget)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(ids, output_attentions=True)
    kvfold.enable(model)
    values = stock.past_key_values.layers[0].values
    rows = stock.attentions[0][:, :, -window:].mean(2).unflatten(1, (2, -1)).mean(2)
    scores = rows * values.abs().sum(-1)
    scores[..., :sinks] = scores[..., -window:] = torch.inf
    for head in range(2):
        best = set(scores[0, head].topk(budget).indices.tolist())
        assert set(cache.positions(0)[0][head].tolist()) == best


def test_the_pages_method_is_listed_composed_and_configured(vatp):
    registry.import_methods(str(vatp))
    cls = kvfold.list_methods()["vatp"]
    assert kvfold.list_methods() == kvfold.list_methods()
    assert cls.summary == "Keeps entries by the last queries' attention times the value's norm."
    assert parse("vatp_narrow") == cls(window=4)
    assert str(parse("vatp_narrow + kivi:bits=8")) == "vatp:window=4 + kivi:bits=8"
    assert parse("vatp + adakv").stages().heads is not None
    assert parse("vatp + adakv").takes_budget
    with pytest.raises(KvfoldError, match="vatp:window is at least 1"):
        parse("vatp:window=0")


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "deepseek_v3"])
def test_the_pages_method_is_right_for_padded_rows(vatp, name):
    registry.import_methods(str(vatp))
    model, (ids, mask) = build(name), prompts((64, 40))
    together = CompressedCache(model, "vatp:window=8", 24)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=together)
    alone = read(model, "vatp:window=8", ids[1:, 24:], 24)
    for layer in range(len(alone.states)):
        for padded, bare in zip(
            together.positions(layer)[1], alone.positions(layer)[0], strict=True
        ):
            assert torch.equal(padded - 24, bare)


# --- the command line ----------------------------------------------------------------------------


def test_commands_take_methods_of_a_file(vatp, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    own = ("--import", str(vatp), "--method", "vatp:window=8", "--budget", "40")
    ran = kvfold_command("run", folder, "--file", str(text), *own, "--max-new-tokens", "2")
    assert ran.exit_code == 0 and "vatp:window=8, budget 40 tokens" in ran.stdout
    out = tmp_path / "saved.kvfold"
    made = kvfold_command("compress", folder, str(text), *own, "--out", str(out))
    assert made.exit_code == 0, made.output
    asked = kvfold_command("ask", folder, str(out), "is the sky blue", "--import", str(vatp))
    assert asked.exit_code == 0, asked.output


def test_an_unknown_process_needs_the_import_that_the_error_names(vatp, folder, tmp_path):
    text, saved = tmp_path / "text.txt", tmp_path / "saved.kvfold"
    text.write_text(PROMPT)
    registry.import_methods(str(vatp))
    tokenizer = word_tokenizer()
    context = kvfold.compress(tiny_llama(), tokenizer, PROMPT, "vatp:window=8 + kivi:group=8", 40)
    context.save(saved)
    for name in ("vatp", "vatp_narrow"):
        del registry._REGISTRY[name]
    with pytest.raises(ContextFileError, match=r"method 'vatp' of the module vatp.*--import vatp"):
        kvfold.load(saved, tiny_llama(), tokenizer)
    # Before any model is loaded.
    message = refused("ask", "no-such-model", str(saved), "is the sky blue")
    assert "'vatp' of the module vatp" in message and "--import vatp" in message


def test_commands_take_methods_by_a_modules_name_from_where_they_are_run(vatp, monkeypatch):
    monkeypatch.chdir(vatp.parent)
    listed = kvfold_command("methods", "--import", "vatp")
    assert listed.exit_code == 0 and "arXiv 2406.12335" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["run", "compress", "ask", "eval", "inspect", "methods", "bench", "serve"]
)
def test_every_command_that_takes_a_method_has_the_option(command):
    shown = kvfold_command(command, "--help")
    assert shown.exit_code == 0 and "--import" in shown.stdout


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("missing.py", None, "No such file"),
        ("nowhere", None, "No module named 'nowhere'"),
        ("broken.py", "1 / 0", "ZeroDivisionError: division by zero"),
        ("broken.py", "def", "SyntaxError"),
        ("empty.py", "x = 1", "registers no method"),
        ("json.py", "x = 1", "a module json exists, rename the file"),
        ("twice.py", EXAMPLE.replace('"vatp"', '"snapkv"'), "'snapkv' is taken by"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, name, text, reason):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    named = str(path) if name.endswith(".py") else name
    message = refused("methods", "--import", named)
    assert Path(name).stem in message and reason in message
    assert parse("snapkv") == SnapKV()


def test_workers_import_what_their_command_did(vatp, monkeypatch):
    monkeypatch.chdir(vatp.parent)
    registry.import_methods("vatp.py")
    method = pickle.dumps(parse("vatp:window=4"))
    work = pickle.loads(pickle.dumps(workers.WorkerSpec("model", print, print)))
    for name in ("vatp", "vatp_narrow"):
        del registry._REGISTRY[name]
    del sys.modules["vatp"]
    monkeypatch.chdir("/")
    monkeypatch.setattr(workers, "load", lambda *_: (None, None))
    workers.load_in_worker(work, 1)
    assert pickle.loads(method) == parse("vatp:window=4")


# --- plugins -------------------------------------------------------------------------------------


@pytest.fixture
def plugins(monkeypatch, vatp):
    """Installs entry points, as `{name: value}`."""

    def install(values: dict[str, str]) -> None:
        found = EntryPoints(EntryPoint(n, v, registry.PLUGINS) for n, v in values.items())
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: found)
        monkeypatch.syspath_prepend(str(vatp.parent))
        registry._load_plugins.cache_clear()

    yield install
    registry._load_plugins.cache_clear()


def test_a_plugins_methods_are_known_when_they_are_asked_for(plugins):
    plugins({"vatp": "vatp"})
    assert parse("snapkv") and "vatp" not in sys.modules
    assert parse("vatp:window=4") and "vatp" in sys.modules
    assert "vatp_narrow" in kvfold.list_methods()


def test_a_plugin_may_name_the_class(plugins):
    plugins({"vatp": "vatp:VATP"})
    assert "vatp" in kvfold.list_methods()


def test_a_plugin_that_fails_is_left_out_with_a_warning(plugins):
    plugins({"gone": "no_such_module", "vatp": "vatp"})
    with pytest.warns(
        UserWarning, match=r"plugin 'gone' \(no_such_module of .*ModuleNotFoundError"
    ):
        known = kvfold.list_methods()
    assert {"vatp", "snapkv"} <= set(known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvfold.list_methods()


def test_a_plugin_cannot_take_a_method_of_kvfolds_own(plugins, tmp_path):
    (tmp_path / "twice.py").write_text(EXAMPLE.replace('"vatp"', '"snapkv"'))
    plugins({"twice": "twice"})
    with pytest.warns(UserWarning, match="'snapkv' is taken by kvfold.methods.snapkv.SnapKV"):
        kvfold.list_methods()
    assert kvfold.list_methods()["snapkv"] is SnapKV


@pytest.mark.slow
def test_kvfolds_own_come_first_in_a_new_process(tmp_path):
    (tmp_path / "twice.py").write_text(EXAMPLE.replace('"vatp"', '"snapkv"'))
    ran = subprocess.run(
        [sys.executable, "-c", "import twice"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "'snapkv' is taken by kvfold.methods.snapkv.SnapKV" in ran.stderr


# --- registration --------------------------------------------------------------------------------


def by_position(seen: Observation) -> Tensor:
    return seen.positions.float()


@dataclass(frozen=True)
class Unregistered(Method):
    """The newest tokens."""

    sinks: int = 0

    def stages(self) -> Stages:
        return Stages(score=by_position, forced=Forced(sinks=self.sinks))


@dataclass(frozen=True)
class OfAnother(SnapKV):
    """Derived from a registered method, and not registered itself."""


def test_an_unregistered_method_works_but_is_not_saved(model, tmp_path):
    ids = prompts((64,))[0]
    cache = read(model, Unregistered(sinks=3), ids)
    assert cache.positions(0)[0][0].tolist() == [0, 1, 2, *range(27, 64)]
    assert str(cache.stats()).startswith("Unregistered:sinks=3, budget 40 tokens")
    assert str(read(model, OfAnother(), ids).stats()).startswith("OfAnother, ")
    for method in (Unregistered(), OfAnother()):
        context = kvfold.compress(tiny_llama(), word_tokenizer(), PROMPT, method, 40)
        assert type(method).__name__ in repr(context)
        with pytest.raises(KvfoldError, match=f"{type(method).__name__} is not a registered"):
            context.save(tmp_path / "saved.kvfold")


def test_a_class_instead_of_an_instance_is_refused(model):
    with pytest.raises(KvfoldError, match=r"an instance: write SnapKV\(\)"):
        CompressedCache(model, SnapKV, 40)


def test_layers_are_sized_evenly_where_a_method_does_not_say():
    assert Stages(score=by_position).allocate is uniform
    assert Stages().allocate is None


def test_another_class_cannot_take_a_name():
    with pytest.raises(KvfoldError, match="'snapkv' is taken by kvfold"):
        register("snapkv")(Unregistered)
    with pytest.raises(KvfoldError, match="'streaming_llm' is taken"):
        register("streaming", presets={"llm": {}})(Unregistered)
    assert type(parse("snapkv")) is SnapKV and "streaming" not in kvfold.list_methods()


def test_a_class_that_is_defined_again_takes_its_own_place(vatp):
    registry.import_methods(str(vatp))
    module, first = sys.modules["vatp"], kvfold.list_methods()["vatp"]
    vatp.write_text(EXAMPLE.replace("window: int = 16", "window: int = 17"))
    os.utime(vatp, (1, 1))  # bytecode is told from newer files by the second
    importlib.invalidate_caches()
    sys.path.insert(0, str(vatp.parent))
    again = importlib.reload(module)
    assert kvfold.list_methods()["vatp"] is again.VATP is not first
    assert parse("vatp").window == 17


def test_a_built_in_may_be_reloaded():
    module = importlib.import_module("kvfold.methods.knorm")
    kept = dict(vars(module))
    try:
        again = importlib.reload(module).KNorm
        assert type(parse("knorm")) is again is not kept["KNorm"]
    finally:
        vars(module).update(kept)


def test_a_method_without_docstring_is_called_by_its_class():
    @register("silent")
    @dataclass(frozen=True)
    class Silent(Method):
        size: int = 3

    @register("stripped")
    @dataclass(frozen=True)
    class Stripped(Method):
        pass

    Stripped.__doc__ = None
    register("stripped")(Stripped)
    known = kvfold.list_methods()
    assert (known["silent"].summary, known["stripped"].summary) == ("Silent", "Stripped")


def test_what_cannot_be_registered_is_refused():
    class Bare(Method):
        pass

    @dataclass
    class Foreign:
        pass

    @dataclass(frozen=True)
    class Demanding(Method):
        size: int

    @dataclass(frozen=True)
    class Twice(Method):
        pass

    with pytest.raises(KvfoldError, match=r'write @register\("my_method"\)'):
        register(Bare)
    with pytest.raises(KvfoldError, match=r"@dataclass\(frozen=True\) directly below @register"):
        register("bare")(Bare)
    with pytest.raises(KvfoldError, match=r"derived from kvfold\.Method"):
        register("foreign")(Foreign)
    with pytest.raises(KvfoldError, match="give a default to size"):
        register("demanding")(Demanding)
    for name in ("My", "a:b", "a+b", "", "a,b", "2d"):
        with pytest.raises(KvfoldError, match="lower-case letters, digits and _"):
            register(name)(Twice)
    register("once")(Twice)
    with pytest.raises(KvfoldError, match="registered as 'once'"):
        register("another")(Twice)


# --- scores --------------------------------------------------------------------------------------

WRONG = {
    "flat": lambda seen: by_position(seen)[:, 0],
    "per_query_head": lambda seen: by_position(seen).repeat_interleave(4, 1),
    "one_short": lambda seen: by_position(seen)[..., 1:],
    "whole": lambda seen: seen.positions,
    "listed": lambda seen: by_position(seen).tolist(),
    "truth": lambda seen: seen.positions > 3,
}


@dataclass(frozen=True)
class Wrong(Method):
    """A method whose scores are wrong in some way, from some moment on."""

    kind: str = "right"
    decode: Literal["append", "hold"] = "append"
    only_attention: bool = False

    def stages(self) -> Stages:
        score = partial(wrong, self.kind)
        needs = Needs(LastQueries(1), only_attention=self.only_attention)
        return Stages(needs=needs, score=score, allocate=uniform, when=when_of(self.decode))


def wrong(kind: str, seen: Observation) -> Tensor:
    if kind in WRONG:
        return WRONG[kind](seen)
    row = seen.group_mean(seen.window_attention(1)[:, :, 0])
    late = seen.attention is not None  # what a single query showed: after a generated token
    if kind == "nan" or (kind == "nan_late" and late):
        row = row.clone()
        row[..., 5] = torch.nan
    return row[..., 1:] if kind == "short_late" and late else row


@pytest.mark.parametrize("kind", WRONG)
def test_scores_of_wrong_shape_or_kind_are_refused_by_the_methods_name(model, kind):
    with pytest.raises(
        KvfoldError, match=rf"^Wrong:kind={kind} scores with .*\[1, 2, 64\] is wanted"
    ):
        read(model, Wrong(kind), prompts((64,))[0])


def test_scores_with_nan_are_refused_by_the_methods_name(model):
    with pytest.raises(KvfoldError, match=r"^Wrong:kind=nan scores entries with NaN"):
        read(model, Wrong("nan"), prompts((64,))[0])


@pytest.mark.parametrize("only_attention", [False, True])
@pytest.mark.parametrize("kind", ["nan_late", "short_late"])
def test_scores_that_are_wrong_after_a_generated_token_are_refused_too(model, kind, only_attention):
    ids = prompts((66,))[0]
    cache = read(model, Wrong(kind, "hold", only_attention), ids[:, :64])
    with pytest.raises(KvfoldError, match=f"^Wrong:kind={kind}.* scores "), torch.no_grad():
        for at in (64, 65):
            model(ids[:, at : at + 1], past_key_values=cache)


READS = {
    "window_attention": lambda seen: seen.window_attention(21)[:, ::4, 0],
    "window_logits": lambda seen: seen.window_logits(21)[:, :, 0, 0],
    "unrotated": lambda seen: seen.unrotated()[..., 0],
    "output_norms": lambda seen: seen.output_norms()[:, ::4],
    "learned_scores": lambda seen: seen.learned_scores(),
    "moments": lambda seen: seen.future_query_moments(4),
}


@dataclass(frozen=True)
class Greedy(Method):
    """A method whose score reads more than its Needs say."""

    read: str = "window_attention"
    window: int = 0

    def stages(self) -> Stages:
        return Stages(needs=Needs(LastQueries(self.window)), score=READS[self.read])


@pytest.mark.parametrize("length", [64, 18])
@pytest.mark.parametrize("window", [0, 16, 20])
@pytest.mark.parametrize("read_", READS)
def test_scores_that_read_more_than_they_need_are_refused(model, read_, window, length):
    with pytest.raises(KvfoldError, match=r"for\smethods\swith\sNeeds\("):
        read(model, Greedy(read_, window), prompts((length,))[0], 8)


def test_scores_read_as_many_queries_as_a_short_text_has(model):
    for window, length in ((21, 64), (30, 64), (21, 9)):
        read(model, Greedy("window_attention", window), prompts((length,))[0], 8)


def test_a_window_of_no_query_is_refused(model, monkeypatch):
    monkeypatch.setitem(READS, "none", lambda seen: seen.window_attention(0))
    with pytest.raises(KvfoldError, match="at least 1 query, not 0"):
        read(model, Greedy("none", 16), prompts((64,))[0])


def test_nan_for_padding_alone_is_no_error(model):
    ids, mask = prompts((64, 40))
    cache = CompressedCache(model, Padded(), 24)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.positions(0)[1][0].tolist() == list(range(40, 64))


@dataclass(frozen=True)
class Extreme(Method):
    """One infinite score for all entries."""

    highest: bool = False
    recent: int = 0
    decode: Literal["append", "hold", "every"] = "append"

    def stages(self) -> Stages:
        forced, every = Forced(recent=self.recent), int(self.decode == "every")
        score = partial(constant, torch.inf if self.highest else -torch.inf)
        return Stages(score=score, forced=forced, decode=self.decode, every=every)


def constant(score: float, seen: Observation) -> Tensor:
    return by_position(seen).fill_(score)


@pytest.mark.parametrize("decode", ["append", "hold", "every"])
@pytest.mark.parametrize("highest", [False, True])
def test_infinite_scores_evict_no_forced_entry_and_keep_no_padding(model, highest, decode):
    ids, mask = prompts((40, 15))
    cache = CompressedCache(model, Extreme(highest, 4, decode), 12, protect=[(30, 34)])
    kvfold.generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False)

    for row, (first, forced) in enumerate([(0, {30, 31, 32, 33}), (25, set())]):
        for kept in cache.positions(0)[row]:
            assert {*kept.tolist()} >= forced | {40, 41, 42, 43}
            assert int(kept.min()) >= first
            assert len(kept) == (16 if decode == "append" else 12)


@dataclass(frozen=True)
class Padded(Method):
    """The newest tokens, with NaN where there is none."""

    def stages(self) -> Stages:
        return Stages(
            score=lambda seen: by_position(seen).masked_fill(seen.positions < 0, torch.nan)
        )


# --- slots and sizes -----------------------------------------------------------------------------

SELECTIONS = {
    "too_many": (lambda slots, stored: torch.arange(30).expand(*slots.shape[:2], 30), "more ent"),
    "one_often": (lambda slots, stored: slots * 0, "slots that do not ascend"),
    "unsorted": (lambda slots, stored: slots.flip(-1), "slots that do not ascend"),
    "beyond": (lambda slots, stored: slots + stored - 12, "slots outside of 40 entries"),
    "unforced": (lambda slots, stored: torch.arange(20, 32).expand_as(slots), "not all forced"),
    "hole_last": (lambda slots, stored: slots.roll(-1, -1).index_fill(2, LAST, -1), "holes behind"),
    "int32": (lambda slots, stored: slots.int(), r"torch.int32 \[1, 2, 12\]"),
    "none": (lambda slots, stored: None, "a NoneType"),
}
LAST = torch.tensor([11])
SCHEDULES = {
    "short": lambda total, tokens, layers: [total // layers] * (layers - 1),
    "negative": lambda total, tokens, layers: [-1] * layers,
    "half": lambda total, tokens, layers: [0.5] * layers,
    "none": lambda total, tokens, layers: None,
}


@dataclass(frozen=True)
class Careless(Method):
    """A method with one wrong stage."""

    select: str = ""
    schedule: str = ""
    heads: bool = False

    def stages(self) -> Stages:
        return Stages(
            score=by_position,
            allocate=SCHEDULES[self.schedule] if self.schedule else uniform,
            select=partial(selected, self.select) if self.select else None,
            heads=halves if self.heads else None,
        )


def selected(kind: str, seen, scores, forced, positions, counts):
    right = top(scores.masked_fill(forced, torch.inf), counts)
    return SELECTIONS[kind][0](right, scores.shape[-1])


def halves(scores: Tensor, per_head: Tensor) -> Tensor:
    return per_head[:, None].expand(scores.shape[:2]) / 2


@pytest.mark.parametrize("kind", SELECTIONS)
def test_a_wrong_selection_is_refused_by_the_methods_name(model, kind):
    cache = CompressedCache(model, Careless(kind), 12, protect=[(5, 8)])
    told = f"^Careless:select={kind} selects {SELECTIONS[kind][1]}"
    with pytest.raises(KvfoldError, match=told), torch.no_grad():
        model(prompts((40,))[0], past_key_values=cache)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_is_no_list_of_sizes_is_refused_by_the_methods_name(model, kind):
    with pytest.raises(KvfoldError, match=f"^Careless:schedule={kind} allocates .* whole numbers"):
        read(model, Careless(schedule=kind), prompts((40,))[0])


def test_sizes_of_heads_that_are_no_integers_are_refused(model):
    with pytest.raises(KvfoldError, match=r"heads torch.float32 \[1, 2\] where integers"):
        read(model, Careless(heads=True), prompts((64,))[0])


@dataclass(frozen=True)
class NotesBudget(Method):
    """By position; notes each budget that its score is told."""

    def stages(self) -> Stages:
        needs = Needs(PreviousScores())
        return Stages(needs=needs, score=noted_budget, when=Rounds(8))


told: list[list[int] | None] = []


def noted_budget(seen: Observation) -> Tensor:
    told.append(None if seen.budget is None else seen.budget.tolist())
    return by_position(seen)


@pytest.mark.parametrize("budget", [50, 5000])
def test_scores_know_the_budget_where_everything_is_kept_too(model, budget):
    told.clear()
    with torch.no_grad():
        model(prompts((64,))[0], past_key_values=CompressedCache(model, NotesBudget(), budget))
    assert len(told) == 4 and all(each == [budget] for each in told)
