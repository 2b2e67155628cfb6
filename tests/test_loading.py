# SPDX-License-Identifier: Apache-2.0
"""Models from GGUF files and with a device map: the same answers, or one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import LlamaForCausalLM

import kvfold
from kvfold.errors import KvfoldError
from kvfold.loading import Loading, check_name, check_reachable, load, load_tokenizer
from tests.helpers.commands import refused, run_json
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer

gguf = pytest.importorskip("gguf", reason="GGUF files are read with the package gguf")

FILE, TEXT = "tiny.gguf", "the sky is blue the grass is green a number " * 6
SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = [*SPECIAL, *(f"▁{w}" for w in sorted(set(TEXT.split()))), *"abcdefghijklmnopqrstuvwxyz▁"]
OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection as GGUF has them: the two that RoPE rotates beside each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(model: LlamaForCausalLM, path: Path) -> None:
    """The file that llama.cpp's converter would write, with a sentencepiece vocabulary."""
    config = model.config
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_rope_dimension_count(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("llama")
    out.add_token_list(PIECES)
    out.add_token_scores([-float(rank) for rank in range(len(PIECES))])
    out.add_token_types([2, 3, 3] + [1] * (len(PIECES) - len(SPECIAL)))
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        *_, place = (name := name.removesuffix(".weight")).split(".", 3)
        if name.endswith("q_proj"):
            weight = pairs_together(weight, config.num_attention_heads)
        elif name.endswith("k_proj"):
            weight = pairs_together(weight, config.num_key_value_heads)
        theirs = OF_MODEL.get(name) or f"blk.{name.split('.')[2]}.{OF_LAYER[place]}"
        out.add_tensor(f"{theirs}.weight", weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", vocab_size=len(PIECES), max_position_embeddings=512).float()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    write(model, made / FILE)
    (made / "text.txt").write_text(TEXT)
    return made


def test_a_gguf_file_s_model_is_compressed_as_the_one_it_was_written_from(model, folder):
    read, tokenizer = load(str(folder), Loading(gguf_file=FILE, device="cpu"))
    made = [kvfold.compress(each, tokenizer, TEXT, "snapkv", 40) for each in (model, read)]
    assert made[0].stats().seen > 40 and made[0].stats().kept == made[1].stats().kept
    for layer in range(len(made[0].cache.states)):
        ours, theirs = (each.cache.positions(layer) for each in made)
        for rows in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    answers = [each.ask("the sky is", max_new_tokens=6) for each in made]
    assert answers[0] == answers[1]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("place", [("--device", "cpu"), ("--device-map", "cpu")])
def test_commands_read_gguf_files(folder, tmp_path, place):
    how, name = ("--gguf-file", FILE, *place), str(folder)
    limits = ("--method", "knorm", "--budget", "20")
    text, file = str(folder / "text.txt"), str(tmp_path / "text.kvfold")
    ran = run_json("run", name, "--file", text, *limits, "--max-new-tokens", "3", *how)
    assert ran["stats"]["seen"] > 40
    assert run_json("compress", name, text, "--out", file, *limits, *how)["file"] == file
    assert run_json("ask", name, file, "the sky is", "--max-new-tokens", "3", *how)["answer"]
    # The model of a file without GGUF is not another one.
    assert "config.json is missing" in refused("ask", name, file, "the sky is", *place)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gguf-file", "absent.gguf"), "there is no file absent.gguf"),
        (("--gguf-file", "text.txt"), "GGUF"),
        (("--gguf-file", "cut-20.gguf"), "cannot load"),
        (("--gguf-file", "cut-3000.gguf"), "cannot load"),
        (("--gguf-file", "cut-9000.gguf"), "cannot load"),
        (("--gguf-file", FILE, "--device-map", "nowhere"), "found nowhere"),
        (("--gguf-file", FILE, "--device-map", "meta"), "no weights"),
        (("--gguf-file", FILE, "--device", "meta"), "no weights"),
    ],
)
def test_what_cannot_be_loaded_so_is_one_line(folder, words, said):
    for size in (20, 3000, 9000):
        (folder / f"cut-{size}.gguf").write_bytes((folder / FILE).read_bytes()[:size])
    run = "run", str(folder), "--method", "knorm", "--budget", "20", "--prompt", "the sky"
    assert said in refused(*run, *words)


def test_a_tokenizer_is_loaded_alone(folder, tmp_path):
    for name, how in (("bundled", Loading()), (str(folder), Loading(gguf_file=FILE))):
        assert load_tokenizer(name, how)(TEXT).input_ids == load(name, how)[1](TEXT).input_ids
    with pytest.raises(KvfoldError, match="cannot load"):
        load_tokenizer(str(tmp_path), Loading())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KvfoldError, match="cannot load") as refused_so:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused_so.value)


def test_damaged_weights_are_one_line(tmp_path, model):
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    run = "run", str(tmp_path), "--method", "knorm", "--budget", "20", "--prompt", "a b"
    for size in (5000, 300, 4):
        weights.write_bytes(weights.read_bytes()[-size:])
        assert f"cannot load '{tmp_path}': " in refused(*run)


@pytest.mark.slow
def test_a_device_map_gives_the_answer_of_a_device():
    run = ("run", "bundled", "--method", "knorm", "--budget", "20", "--prompt", TEXT)
    made = [
        run_json(*run, "--max-new-tokens", "4", *place)["answer"]
        for place in (("--device", "cpu"), ("--device-map", "cpu"))
    ]
    assert made[0] == made[1]


def test_the_device_meta_is_none():
    with pytest.raises(KvfoldError, match="no weights"):
        Loading(device="meta")


def test_workers_take_several_gpus_in_turn(monkeypatch):
    def places(loading: Loading) -> list[str | None]:
        return [loading.of_worker(number).device for number in range(4)]

    in_turn = ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    for gpus, expected in ((0, [None] * 4), (1, [None] * 4), (3, in_turn)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert places(Loading()) == expected
    assert places(Loading(device="cpu")) == ["cpu"] * 4
    assert Loading(device_map="auto").of_worker(1) == Loading(device_map="auto")


def test_a_gguf_file_s_path_is_taken(folder: Path) -> None:
    by_path, tokenizer = load(str(folder / FILE))
    by_option, _ = load(str(folder), Loading(gguf_file=FILE))
    assert all(
        torch.equal(one, other)
        for one, other in zip(by_path.parameters(), by_option.parameters(), strict=True)
    )
    assert load_tokenizer(str(folder / FILE)).get_vocab() == tokenizer.get_vocab()


def test_a_folder_of_a_gguf_file_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    said = refused("run", str(tmp_path), "--budget", "0.5", "--prompt", "the sky")
    assert said.endswith(f"for its GGUF file name {str(tmp_path / FILE)!r}")


def test_a_hub_id_is_refused_at_once_while_the_hub_does_not_answer(monkeypatch, tmp_path) -> None:
    asked: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            assert timeout <= 10
            raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said = refused("run", "Qwen/Qwen3-0.6BB", "--budget", "0.5", "--prompt", "hello")
    assert "cannot load 'Qwen/Qwen3-0.6BB'" in said and "(no route): check the name" in said
    with pytest.raises(KvfoldError, match=r"cannot load 'some/adapter'.*check the name"):
        load("bundled", Loading(adapter="some/adapter"))
    with pytest.raises(KvfoldError, match="check the name"):
        load_tokenizer("some/model", Loading(revision="v2"))
    assert len(asked) == 3 and asked[-1].endswith("some/model/resolve/v2/config.json")
    (tmp_path / "models--some--model").mkdir()  # downloaded before
    check_reachable("some/model")
    assert len(asked) == 3


def test_a_mistyped_file_or_folder_is_told_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    (tmp_path / "model-q4.gguf").touch()
    (tmp_path / "smollm2.txt").touch()
    for name, said in (
        ("smolm2", "there is no such folder; did you mean '.*/smollm2'\\?$"),
        ("model_q4.gguf", "there is no such file; did you mean '.*/model-q4.gguf'\\?$"),
        ("none.gguf", "there is no such file$"),
        ("another", "there is no such folder$"),
    ):
        with pytest.raises(KvfoldError, match=said):
            check_name(str(tmp_path / name), Loading())
    with pytest.raises(KvfoldError, match="there is no such file"):
        check_name("none-at-all.gguf", Loading())


def test_a_mistyped_bundled_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", silent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(KvfoldError, match=r"check the name; did you mean 'bundled'\?"):
        load("bundeld")


def test_a_damaged_or_unnamed_model_is_told_by_the_name_given(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(KvfoldError, match=r"cannot load '.*/bad\.gguf': "):
        load(str(tmp_path / "bad.gguf"))
    for name in ("", " "):
        with pytest.raises(KvfoldError, match="the model's name is empty"):
            load(name)
