# SPDX-License-Identifier: Apache-2.0
"""Context files: what comes back, what is refused, and what a crash leaves behind."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvfold
from kvfold import ContextFileError, KvfoldError
from kvfold.cache.layer import CompressedLayer
from kvfold.contexts.files import format as files_format
from kvfold.contexts.files import stock_layers as others
from kvfold.contexts.files import write
from kvfold.contexts.files.format import (
    CHECKSUM,
    FORMAT,
    HEADER,
    VERSION,
    StockLayerHeader,
    digest,
    opened,
    read_header,
)
from kvfold.loading import load as load_model
from kvfold.methods.base import preset, spelled_out
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.contexts import DOCUMENT, KINDS, KIVI, QUESTION, new_model, state
from tests.helpers.tokenizers import WORDS, word_tokenizer

EVERY = pytest.mark.parametrize("spec", KINDS)


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def compressed(model: Any, tokenizer: Any, spec: str, **options: Any) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, DOCUMENT, spec, KINDS[spec][0], **options)


@pytest.fixture(scope="module")
def saved(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small context of a ragged, packed kind."""
    path = tmp_path_factory.mktemp("contexts") / "saved.kvfold"
    compressed(model, tokenizer, f"snapkv + {KIVI}").save(path)
    return path


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def assert_same(one: kvfold.CompressedCache, other: kvfold.CompressedCache) -> None:
    """Bit for bit."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if not isinstance(mine, CompressedLayer):
            continue
        a, b = state(mine.state), state(theirs.state)
        assert a.keys() == b.keys()
        differing = [name for name in a if not same(a[name], b[name])]
        assert not differing
    assert same(one.phase.prefix, other.phase.prefix)
    assert (one.method, one.budget, one.protect) == (other.method, other.budget, other.protect)
    assert (one.seed, one.per_chunk) == (other.seed, other.per_chunk)


def next_turns(context: kvfold.Context) -> list[Tensor]:
    """Logits of a turn that compresses again, and of steps after it."""
    cache, model = context.cache, context.model
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 12, (1, 50), generator=generator)
    out = []
    with torch.no_grad():
        for piece in (ids[:, :44], *ids[:, 44:].split(1, 1)):
            out.append(model(piece, past_key_values=cache, use_cache=True).logits)
    return out


def read_on(context: kvfold.Context) -> kvfold.Context:
    """The context of all that its cache has read."""
    unknown = torch.zeros(1, context.cache.get_seq_length(), dtype=torch.long)
    return dataclasses.replace(context, ids=unknown)


# --- round trip ----------------------------------------------------------------------------------


@EVERY
def test_what_is_saved_comes_back_and_goes_on(model, tokenizer, tmp_path, spec):
    context = compressed(model, tokenizer, spec, protect=[(7, 9)] if spec == "snapkv" else ())
    assert isinstance(context.cache.states[-1].store, KINDS[spec][1])
    path = tmp_path / "a.kvfold"
    context.save(path)
    loaded = kvfold.load(path, model, tokenizer)
    assert_same(loaded.cache, context.cache)
    assert loaded.stats() == context.stats()
    assert loaded.frame == context.frame and torch.equal(loaded.ids, context.ids)
    answers = [c.ask(QUESTION, max_new_tokens=8) for c in (context, loaded, context)]
    assert len(set(answers)) == 1
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)
    assert_same(loaded.cache, context.cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_come_back_bit_for_bit(tokenizer, tmp_path, dtype):
    model = new_model(dtype=dtype)
    for spec in ("snapkv", "adakv", KIVI, "minicache"):
        context = compressed(model, tokenizer, spec)
        context.save(tmp_path / "a.kvfold")
        assert_same(kvfold.load(tmp_path / "a.kvfold", model, tokenizer).cache, context.cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gpt2", "deepseek_v3", "gemma3n"])
def test_other_layers_and_other_keys_come_back(tokenizer, tmp_path, family):
    changes = {"vocab_size_per_layer_input": 12} if family == "gemma3n" else {}
    model = new_model(family, **changes)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert_same(loaded.cache, context.cache)
    assert loaded.ask(QUESTION, max_new_tokens=8) == context.ask(QUESTION, max_new_tokens=8)
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)


def test_reindexed_sinks_are_saved_as_given_whatever_was_read_since(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "streaming_llm")
    context.save(tmp_path / "before.kvfold")
    next_turns(context)
    given = compressed(model, tokenizer, "full").cache.states[0].stored().keys[:, :, :4]
    context = read_on(context)
    context.save(tmp_path / "after.kvfold")
    moved = context.cache.states[0].stored().keys[:, :, :4]
    for name in ("before", "after"):
        with safe_open(tmp_path / f"{name}.kvfold", "pt") as file:
            assert torch.equal(file.get_tensor("layers.0.keys.1")[:4], given[0, 1])
    assert not torch.equal(moved, given)
    loaded = kvfold.load(tmp_path / "after.kvfold", model, tokenizer)
    for one, other in zip(next_turns(context), next_turns(loaded), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_sinks_move_after_loading_a_text_that_fitted_the_budget(model, tokenizer, tmp_path):
    tokens = compressed(model, tokenizer, "full").stats().seen
    context = kvfold.compress(model, tokenizer, DOCUMENT, "streaming_llm", tokens)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    steps = [
        [model(torch.tensor([[7]]), past_key_values=c.cache).logits for _ in range(4)]
        for c in (context, loaded)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
    assert not torch.equal(
        loaded.cache.states[0].stored().keys[:, :, :4],
        loaded.cache.states[0].keys_as_given()[:, :, :4],
    )


def test_what_a_decoding_step_left_dead_is_saved_too(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "h2o")
    token = torch.tensor([[5]])
    with torch.no_grad():
        for _ in range(3):
            model(token, past_key_values=context.cache, use_cache=True)
    assert context.cache.states[0].stored().dead == 3
    read_on(context).save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert_same(loaded.cache, context.cache)


def test_a_second_layer_of_a_pair_shares_again(model, tokenizer, tmp_path):
    context = compressed(model, tokenizer, "minicache")
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    first, second = (layer.stored()._keys.encoded for layer in loaded.cache.states[-2:])
    assert first.shared is second.shared
    shared = read_header(tmp_path / "a.kvfold").same_as
    assert shared["layers.3.keys.directions.0"] == "layers.2.keys.directions.0"


def test_nothing_is_shared_with_the_file_or_with_another_load(model, tokenizer, saved):
    one, other = (kvfold.load(saved, model, tokenizer) for _ in range(2))
    before = copy.deepcopy(state(other.cache.states[0]))
    for tensors in one.cache.states[0].stored().named().values():
        for tensor in tensors:
            tensor.zero_()
    assert all(same(before[k], v) for k, v in state(other.cache.states[0]).items())
    assert_same(kvfold.load(saved, model, tokenizer).cache, other.cache)


def test_every_method_is_spelled_out_so_that_it_can_be_read():
    for name in kvfold.list_methods():
        method = preset(name)
        assert kvfold.parse(spelled_out(method)) == method
    text = "snapkv:window=16 + kivi:bits=2"
    assert kvfold.parse(spelled_out(kvfold.parse(text))) == kvfold.parse(text)
    assert "kernel=" in spelled_out(kvfold.parse(text))


# --- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, "think", "minicache"])
def test_some_heads_are_loaded_alone(model, tokenizer, tmp_path, spec):
    context = compressed(model, tokenizer, spec)
    context.save(tmp_path / "a.kvfold")
    for head in range(2):
        part = kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(head, head + 1))
        for own, whole in zip(part.cache.states, context.cache.states, strict=True):
            length = own.stored().length
            for mine, all_heads in zip(own.stored().dense(), whole.stored().dense(), strict=True):
                assert torch.equal(mine[0, 0], all_heads[0, head, -length:])
            kept = own.columns()[0, 0]
            every = whole.columns()[0, head, -length:]
            assert torch.equal(kept, every)


def test_some_heads_read_only_their_tensors(model, tokenizer, saved, monkeypatch):
    read = []
    whole = files_format.ContextFile.tensor

    def noted(self: Any, name: str) -> Tensor:
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(files_format.ContextFile, "tensor", noted)
    kvfold.load(saved, model, tokenizer, heads=slice(1, 2))
    of_heads = {name.rpartition(".")[2] for name in read if name.startswith("layers.")}
    assert of_heads == {"1", "capacity"}
    read.clear()
    read_header(saved)
    assert read == []


def test_heads_that_are_not_there_are_refused(model, tokenizer, saved):
    with pytest.raises(ContextFileError, match="2 heads, none in"):
        kvfold.load(saved, model, tokenizer, heads=slice(2, 4))


def test_a_recurrent_state_is_not_loaded_in_part(tokenizer, tmp_path):
    model = new_model("qwen3_5")
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(tmp_path / "a.kvfold")
    with pytest.raises(ContextFileError, match="a state without heads"):
        kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(0, 1))


def test_sliding_layers_are_loaded_in_part(tokenizer, tmp_path):
    model = new_model("gemma3")
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    part = kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(1, 2))
    sliding = [i for i, layer in enumerate(part.cache.layers) if layer.is_sliding]
    assert sliding
    for i in sliding:
        assert torch.equal(part.cache.layers[i].keys, context.cache.layers[i].keys[:, 1:])


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 here, 4 in the file"),
        ({"intermediate_size": 64}, "intermediate_size 64 here, 96 in the file"),
        ({"seed": 5}, "the same configuration, but other weights"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "another RoPE: rope_theta 500.0 here, 10000.0 in the file",
        ),
    ],
    ids=str,
)
def test_another_model_is_refused_by_what_differs(tokenizer, saved, changes, named):
    other = new_model(**changes)
    with pytest.raises(ContextFileError, match="was made with another") as refusal:
        kvfold.load(saved, other, tokenizer)
    assert named in str(refusal.value)


def test_another_family_is_refused(tokenizer, saved):
    with pytest.raises(ContextFileError, match="a MistralForCausalLM here, a LlamaForCausalLM in"):
        kvfold.load(saved, new_model("mistral"), tokenizer)


def test_other_frequencies_are_refused(tokenizer, saved):
    model = new_model()
    model.model.rotary_emb.original_inv_freq *= 1.001
    with pytest.raises(ContextFileError, match="another RoPE: other frequencies"):
        kvfold.load(saved, model, tokenizer)


def test_another_dtype_is_refused(tokenizer, saved):
    model = new_model()
    half = model.to(torch.bfloat16)
    with pytest.raises(ContextFileError, match="holds float32, and the model computes in bfloat16"):
        kvfold.load(saved, half, tokenizer)


def test_another_tokenizer_is_refused(model, saved):
    other = word_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ContextFileError, match="another vocabulary of the tokenizer"):
        kvfold.load(saved, model, other)


def rewritten(path: Path, saved: Path, version: str = VERSION, **changes: Any) -> Path:
    """A copy of a file whose header says something else, with the right checksum."""
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()[HEADER])
    text = json.dumps(header | changes)
    found = {FORMAT: version, HEADER: text, CHECKSUM: digest(version + text)}
    save_file(tensors, path, found)
    return path


def test_another_version_is_refused(model, tokenizer, saved, tmp_path):
    path = rewritten(tmp_path / "a.kvfold", saved, version="2")
    with pytest.raises(ContextFileError, match=r"format version '2', and this kvfold reads '1'"):
        kvfold.load(path, model, tokenizer)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"method": "newest:of=all"}, "a method that this kvfold does not have: unknown method"),
        ({"method": "snapkv:window=16"}, "and this kvfold has snapkv:window=16,"),
        ({"written_by": 5}, "its header says something else"),
        ({"more": 5}, "its header says something else"),
        ({"layers": []}, "holds 0 layers, and the model's cache has 4"),
        ({"same_as": {"ids": "prefix"}}, "it has no tensor prefix"),
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused(model, tokenizer, saved, tmp_path, changes, named):
    path = rewritten(tmp_path / "a.kvfold", saved, **changes)
    with pytest.raises(ContextFileError) as refusal:
        kvfold.load(path, model, tokenizer)
    assert named in str(refusal.value)


def test_keys_that_were_moved_are_refused(model, tokenizer, saved, tmp_path):
    rope = read_header(saved).rope.model_dump() | {"moved": -110}
    path = rewritten(tmp_path / "a.kvfold", saved, rope=rope)
    with pytest.raises(ContextFileError, match="another RoPE: keys moved by -110 positions"):
        kvfold.load(path, model, tokenizer)


def test_what_is_no_context_is_refused(model, tokenizer, saved, tmp_path):
    path = tmp_path / "a.kvfold"
    with pytest.raises(ContextFileError, match=r"cannot read .*a\.kvfold"):
        kvfold.load(path, model, tokenizer)
    path.write_bytes(b"")
    with pytest.raises(ContextFileError, match=r"cannot read .*a\.kvfold"):
        kvfold.load(path, model, tokenizer)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ContextFileError, match="no context of kvfold"):
        kvfold.load(path, model, tokenizer)
    with pytest.raises(ContextFileError, match="cannot read"):
        kvfold.load(tmp_path, model, tokenizer)


@pytest.mark.slow
def test_truncated_and_altered_files_are_refused(model, tokenizer, saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "a.kvfold"
    generator = random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [generator.randrange(len(data)) for _ in range(200)]
    places += [generator.randrange(header) for _ in range(50)]
    for at in places:
        cut, flipped = data[:at], bytearray(data)
        flipped[at] ^= 1 << generator.randrange(8)
        for altered in (cut, bytes(flipped), data + data[:at]):
            if altered == data:
                continue
            path.write_bytes(altered)
            with pytest.raises(ContextFileError):
                kvfold.load(path, model, tokenizer)


def test_swapped_tensors_and_other_numbers_are_refused(model, tokenizer, saved, tmp_path):
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = file.metadata()
    one, other = "layers.0.keys.words.0", "layers.0.keys.words.1"
    path = tmp_path / "a.kvfold"
    for changes in (
        {one: tensors[other], other: tensors[one]},
        {one: tensors[one].view(torch.float32)},
        {one: tensors[one].flatten()},
        {"more": tensors[one].clone()},
    ):
        save_file(tensors | changes, path, found)
        with pytest.raises(ContextFileError, match="is damaged"):
            kvfold.load(path, model, tokenizer)


# --- writing -------------------------------------------------------------------------------------


def test_an_error_while_writing_leaves_the_old_file(model, tokenizer, saved, tmp_path, monkeypatch):
    path = tmp_path / "a.kvfold"
    path.write_bytes(saved.read_bytes())
    context = compressed(model, tokenizer, "snapkv")

    def half(tensors: Any, temporary: Path, header: Any) -> None:
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", half)
    with pytest.raises(KvfoldError, match=r"cannot write .*No space left"):
        context.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["a.kvfold"]


KILLED = """
import sys, time
from pathlib import Path
from kvfold.contexts.files.write import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.kvfold"
    path.write_bytes(b"old")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert path.read_bytes() == b"old"
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".kvfold", ".tmp"]


def test_a_file_that_is_replaced_keeps_the_usual_rights(model, tokenizer, tmp_path):
    path, usual = tmp_path / "a.kvfold", tmp_path / "usual"
    usual.touch()
    compressed(model, tokenizer, "snapkv").save(path)
    assert path.stat().st_mode == usual.stat().st_mode


def test_no_folder_is_made(model, tokenizer, tmp_path):
    with pytest.raises(KvfoldError, match="cannot write"):
        compressed(model, tokenizer, "snapkv").save(tmp_path / "none" / "a.kvfold")


@dataclass(frozen=True)
class Unregistered(type(preset("snapkv"))):  # type: ignore[misc]
    name: ClassVar[str] = "snapkv"


def test_what_could_not_be_loaded_is_not_saved(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    context = kvfold.compress(model, tokenizer, DOCUMENT, Unregistered(), 40)
    with pytest.raises(KvfoldError, match="is not a registered method"):
        context.save(path)
    context = compressed(model, tokenizer, "snapkv")
    with pytest.raises(KvfoldError, match=r"has read \d+ tokens, and the context has 1:"):
        dataclasses.replace(context, ids=context.ids[:, :1]).save(path)
    with context.cache.frozen(), pytest.raises(KvfoldError, match="in the middle of a turn"):
        context.save(path)
    context.cache.batch_repeat_interleave(2)
    with pytest.raises(KvfoldError, match="several rows"):
        context.save(path)
    context.cache.reset()
    with pytest.raises(KvfoldError, match="nothing to save"):
        context.save(path)
    assert not path.exists()


# --- what a file says ----------------------------------------------------------------------------


def test_the_header_says_what_is_inside(model, tokenizer, saved):
    header = read_header(saved)
    stats = kvfold.load(saved, model, tokenizer).stats()
    assert header.seen == stats.seen
    assert [layer.kept for layer in header.layers] == [rows[0] for rows in stats.kept]
    assert header.bits == (4, 4) and header.dtype == "float32"
    assert header.model.config["num_key_value_heads"] == 2
    assert header.rope.parameters["rope_type"] == "default"
    with safe_open(saved, "pt") as file:
        ids, places = file.get_tensor("ids"), file.get_tensor("layers.0.columns.0")
        frequencies = file.get_tensor("rope.rotary_emb.inv_freq")
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    words = tokenizer.decode(ids[places.long()].tolist())
    assert set(words.split()) <= {*WORDS, "<bos>"}


@pytest.mark.slow
def test_commands(model, tokenizer, tmp_path):
    folder, text, path = tmp_path / "model", tmp_path / "a.txt", tmp_path / "a.kvfold"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(DOCUMENT)
    made = kvfold_command(
        *("compress", str(folder), str(text), "--method", "snapkv", "--budget", "40")
    )
    assert made.exit_code == 0, made.output
    assert "kept in layers 0-3" in made.output and path.exists()
    shown = kvfold_command("info", str(path))
    assert shown.exit_code == 0 and "snapkv:window=" in shown.output
    assert "LlamaForCausalLM" in shown.output
    asked = kvfold_command("ask", str(folder), str(path), QUESTION, "--max-new-tokens", "8")
    assert asked.exit_code == 0, asked.output
    loaded = kvfold.load(path, *load_model(str(folder)))
    assert loaded.ask(QUESTION, max_new_tokens=8) in " ".join(asked.output.split())
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot read" in refused("info", str(path))
    assert "cannot read" in refused("ask", "none", str(path), QUESTION)
    assert "no folder" in refused("compress", "none", str(text), "-o", str(tmp_path / "x" / "y"))
    assert "cannot read" in refused("compress", "none", str(tmp_path / "none.txt"))


# --- while others write --------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    small, large = (kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", n) for n in (40, 90))
    small.save(path)
    with opened(path) as file:
        large.save(path)
        file.check()
        assert file.header.budget.amount == 40
    assert read_header(path).budget.amount == 90


def test_savers_and_readers_of_one_name_never_disturb_each_other(model, tokenizer, tmp_path):
    path, done = tmp_path / "a.kvfold", Event()
    both = [kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", n) for n in (40, 90)]
    both[0].save(path)

    def replaced() -> None:
        while not done.is_set():
            for context in both:
                context.save(path)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(replaced)
        try:
            for _ in range(60):
                with opened(path) as file:
                    file.check()
        finally:
            done.set()
        saving.result()


def test_a_file_keeps_its_rights(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(path)
    path.chmod(0o600)
    context.save(path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "numbers",
    [{"update": None}, {"__class__": None}, {"dtype": "dtype nosuch"}, {"a/b": 1}, {"keys/0": 1}],
    ids=str,
)
def test_a_file_sets_nothing_but_what_a_layer_holds(numbers):
    layer = DynamicSlidingWindowLayer(sliding_window=8)
    part = StockLayerHeader(
        index=0, kind=type(layer).__name__, numbers=numbers, by_head=[], whole=[]
    )
    with pytest.raises(ContextFileError, match="layer 0"):
        others.restore(layer, part, {}, {}, torch.device("cpu"))
    assert callable(layer.update)
