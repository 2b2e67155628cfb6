# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM that hold different parts of a context."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import DynamicCache
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

import kvfold
from kvfold.bundled import FOLDER
from kvfold.contexts.files.format import opened, read_header
from kvfold.serve.vllm.export import pages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.per_layer.sizes import VARIABLE, Parts
from kvfold.serve.vllm.placeholders import ServedFolder
from kvfold.serve.vllm.request import CONTEXT
from tests_vllm.bundled import NEW, QUESTIONS, Kvfold, asked
from tests_vllm.server import KEY, served

BLOCK, PLAIN = 32, list(range(5, 105))


def truth(made: Kvfold, path: Path, level: Any, question: list[int]) -> list[int]:
    """Greedy tokens of transformers, token by token: its masks know one length for all layers."""
    cache, meta_model = DynamicCache(), MetaModel(made.model.config, str(FOLDER))
    with opened(path) as file:
        for page in pages(file, meta_model, slice(None), level):
            keys, values = (rows.transpose(0, 1)[None] for rows in (page.keys, page.values))
            cache.update(keys, values, page.layer)
    pending, found = list(question), list[int]()
    kvfold.disable(made.model)
    for place in range(level.count, level.count + len(question) + NEW - 1):
        with torch.no_grad():
            out = made.model(
                torch.tensor([[pending.pop(0)]]),
                past_key_values=cache,
                position_ids=torch.tensor([[place]]),
            )
        if not pending:
            found.append(int(out.logits[0, -1].argmax()))
            pending = found[-1:]
    return found


@dataclass(frozen=True)
class Pyramid:
    """A context whose layers keep ever fewer entries: `kept` each, in parts as `text`."""

    made: Kvfold
    path: Path
    text: str

    @classmethod
    def in_folder(cls, folder: Path) -> Pyramid:
        made = Kvfold.with_files_in(folder)
        context = kvfold.compress(made.model, made.tokenizer, made.document, "pyramidkv", 200)
        path = folder / "pyramid.kvfold"
        context.save(path)
        made.contexts["pyramid"] = context
        kept = [min(layer.kept) for layer in read_header(path).layers]
        assert max(kept) > 3 * min(kept)
        return cls(made, path, ",".join(f"{count / max(kept):.3f}" for count in kept))


def test_the_server_takes_parts(tmp_path):
    pyramid = Pyramid.in_folder(tmp_path)
    parts = Parts.of(pyramid.text, BLOCK)
    request = asked(ServedFolder(tmp_path, parts.level), pyramid.made, "pyramid", QUESTIONS[0])
    level = parts.level(read_header(pyramid.path))
    expected = truth(pyramid.made, pyramid.path, level, request.question)
    headers = {"Authorization": f"Bearer {KEY}"}
    with served(tmp_path, pyramid.text) as address:
        listed = httpx.get(f"{address}/v1/contexts", headers=headers).json()["data"]
        (about,) = (one for one in listed if one["id"] == "pyramid")
        assert about["kept"] == level.count and about["lost"] == pytest.approx(level.lost)
        body = {"model": "bundled", "context_id": "pyramid", "prompt": request.question}
        body |= {"max_tokens": NEW, "temperature": 0}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)
        text = pyramid.made.tokenizer.decode(expected, skip_special_tokens=True)
        found = answer.json()["choices"][0]["text"]
        assert found and text.startswith(found)
        body = request.body | {"model": "bundled", "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_layers_hold_their_parts(tmp_path, monkeypatch):
    pyramid = Pyramid.in_folder(tmp_path)
    made, path = pyramid.made, pyramid.path
    monkeypatch.setenv(VARIABLE, pyramid.text)
    parts = Parts.of(pyramid.text, BLOCK)
    served_folder = ServedFolder(tmp_path, parts.level)
    served, level = served_folder.get("pyramid"), parts.level(read_header(path))
    assert len(set(level.layers)) > 2 and level.lost < 0.2
    expected = [truth(made, path, level, made.question("pyramid", q)) for q in made.questions]
    plain = made.greedy(torch.tensor([PLAIN]))
    requests = [asked(served_folder, made, "pyramid", question) for question in made.questions]
    transfer = KVTransferConfig(
        kv_connector="PartsConnector",
        kv_connector_module_path="kvfold.serve.vllm.per_layer.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"contexts": str(tmp_path)},
    )
    llm = LLM(
        model=str(FOLDER),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=8,
        block_size=BLOCK,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=transfer,
    )
    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    args = {"kv_transfer_params": {CONTEXT: served.id}}
    drawn = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, extra_args=args)
    try:
        for _ in range(2):
            prompts = [*(r.prompt for r in requests), {"prompt_token_ids": PLAIN}]
            outputs = llm.generate(prompts, [drawn, drawn, drawn, how], use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [*expected, plain]
            # Without its salt it fails, and the one beside it does not.
            wrong = {"prompt_token_ids": requests[0].token_ids}
            failed, fine = llm.generate([wrong, prompts[1]], [drawn, drawn], use_tqdm=False)
            assert failed.outputs[0].finish_reason == "error"
            assert list(fine.outputs[0].token_ids) == expected[1]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
