# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve --engine vllm`: context files served by a stock vLLM."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.terminal import console, errors

NEEDED = ("vllm", "fastapi", "uvicorn", "httpx")


def serve(
    model: str,
    *,
    host: str,
    port: int,
    api_key: str | None,
    folder: Path | None,
    body: int,
    arguments: str,
) -> None:
    """Serves the context files of `folder` with vLLM; `arguments` are for vLLM's command line.

    `body` bounds requests, in bytes. Raises KvfoldError without a folder, for a missing package or
    an unsupported model, and if vLLM ends.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KvfoldError(
            f"serving with vLLM needs {', '.join(missing)}: pip install 'kvfold[vllm]'"
        )
    if folder is None:
        raise KvfoldError(
            "name the folder of the contexts, made with `kvfold compress`: --folder PATH"
        )
    out = console()
    with out.status("importing torch and transformers"):
        from transformers import AutoTokenizer

        from kvfold.serve.process import listening
        from kvfold.serve.vllm.catalog import ContextCatalog
        from kvfold.serve.vllm.compatibility import CompatibilityCheck
        from kvfold.serve.vllm.launch import VllmOptions
        from kvfold.serve.vllm.launch import serve as run
        from kvfold.serve.vllm.meta_model import MetaModel
        from kvfold.serve.vllm.placeholders import ServedFolder
    place, config, dtype = _model(model)
    served_folder = ServedFolder(folder)
    compatibility = CompatibilityCheck(served_folder, MetaModel(config, place), dtype)
    contexts = ContextCatalog(served_folder, compatibility, AutoTokenizer.from_pretrained(place))
    bound = listening(host, port)
    for about in contexts.all():
        if "refused" in about:
            errors().print(f"refused: {about['id']}: {about['refused']}", markup=False)
        elif about["lost"]:
            lost = (
                f"{about['id']} loses {about['lost']:.1%} of its entries: heads need equal counts"
            )
            errors().print(lost, markup=False)
    name = Path(model).name if Path(model).is_dir() else model
    engine = VllmOptions(place, name, dtype, folder, api_key, shlex.split(arguments))
    address = bound.getsockname()
    out.print(
        f"{name} at http://{address[0]}:{address[1]}/v1 once vLLM is ready, contexts of {folder}",
        markup=False,
        soft_wrap=True,
    )
    run(engine, contexts, bound, body=body)


def _model(name: str) -> tuple[str, Any, str]:
    """The path or hub id of a model, its configuration, and the dtype that kvfold loads it in.

    Raises KvfoldError if there is no such model.
    """
    from transformers import AutoConfig

    from kvfold.bundled import FOLDER

    if name == "bundled":
        return str(FOLDER), AutoConfig.from_pretrained(FOLDER), "float32"
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise KvfoldError(f"cannot load {name!r}: {first_line}") from problem
    return name, config, str(config.dtype or "float32").removeprefix("torch.")
