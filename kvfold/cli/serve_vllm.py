# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve --engine vllm`: context files served by a stock vLLM."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.errors import KvfoldError
from kvfold.loading import check_reachable, shown_name
from kvfold.serve.vllm.versions import check_installed
from kvfold.terminal import console, errors

if TYPE_CHECKING:
    from kvfold.jobs.compress import CompressOptions
    from kvfold.methods.stages.select.one_set import Rule
    from kvfold.serve.vllm.arrivals import Arrivals

BUDGET = "0.5"  # of texts compressed on arrival
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
    method: str | None = None,
    budget: str | None = None,
    level: Rule | None = None,
    contexts: int = 1000,
    parts: str | None = None,
) -> None:
    """Serves the context files of `folder` with vLLM; `arguments` are for vLLM's command line.

    `body` bounds requests, in bytes. With a `method`, texts of requests are compressed to `budget`
    on arrival, levelled by the rule `level`, and `contexts` of them kept. `parts` of a context are
    held by each layer. Raises KvfoldError without a folder, for a missing package, another version
    of vLLM, a method whose texts vLLM cannot hold or an unsupported model, and if vLLM ends.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KvfoldError(
            f"serving with vLLM needs {', '.join(missing)}: pip install 'kvfold[vllm]'"
        )
    check_installed()
    if folder is None:
        raise KvfoldError(
            "name the folder of the contexts, made with `kvfold compress`: --folder PATH"
        )
    if method is None and (budget is not None or level is not None):
        named = "--budget" if level is None else "--level"
        raise KvfoldError(f"{named} is of texts compressed on arrival: name their --method")
    out = console()
    with out.status("importing torch and transformers"):
        from transformers import AutoTokenizer

        from kvfold.hf.identity import vocabulary
        from kvfold.serve.process import listening
        from kvfold.serve.vllm.catalog import ContextCatalog
        from kvfold.serve.vllm.launch import VllmOptions
        from kvfold.serve.vllm.launch import serve as run
        from kvfold.serve.vllm.meta_model import MetaModel
        from kvfold.serve.vllm.per_layer.sizes import Parts, block_size
        from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
    options = None
    if method is not None:
        options = _compress_options(method, budget, level, parts is not None)
    place, config, dtype = _model(model)
    words = shlex.split(arguments)
    held = None if parts is None else Parts.of(parts, block_size(words))
    served_folder = ServedFolder(folder) if held is None else ServedFolder(folder, held.level)
    meta_model = MetaModel(config, place)
    if held is not None:
        held.check_layers(meta_model.layers)
    compatibility = CompatibilityCheck(served_folder, meta_model, dtype)
    tokenizer = AutoTokenizer.from_pretrained(place)
    arrivals = None
    if options is not None:
        reader = f"{meta_model.identity(dtype)} {vocabulary(tokenizer)}"
        arrivals = _arrivals(model, folder, options, reader, contexts)
    levels = arrivals is not None
    catalog = ContextCatalog(served_folder, compatibility, tokenizer, levels=levels)
    bound = listening(host, port)
    for about in catalog.all():
        if "refused" in about:
            errors().print(f"refused: {about['id']}: {about['refused']}")
        elif "uneven" in about:
            errors().print(f"uneven: {about['id']}: {about['uneven']}")
        elif about["lost"]:
            lost = (
                f"{about['id']} loses {about['lost']:.1%} of its entries: heads need equal counts"
            )
            errors().print(lost)
    name = shown_name(model)
    engine = VllmOptions(place, name, dtype, folder, api_key, words, held)
    address = bound.getsockname()
    out.print(
        f"{name} at http://{address[0]}:{address[1]}/v1 once vLLM is ready, contexts of {folder}",
        soft_wrap=True,
    )
    run(engine, catalog, bound, body=body, arrivals=arrivals)


def _compress_options(
    method: str, budget: str | None, level: Rule | None, parts: bool
) -> CompressOptions:
    """Compression of texts on arrival; raises KvfoldError for what vLLM cannot hold."""
    from kvfold.cli.options import checked
    from kvfold.jobs.compress import CompressOptions
    from kvfold.methods.base import parse
    from kvfold.serve.settings import ServerSettings
    from kvfold.serve.vllm.methods import level_for

    usual = BUDGET if parse(method).takes_budget else None
    chosen, limit = checked(method, budget or usual)
    # A method that prunes tokens between layers reads its text in one forward.
    chunk = None if chosen.stages().token_pruning else ServerSettings.prefill_chunk
    rule = level_for(chosen, level, parts=parts)
    return CompressOptions(chosen, limit, chunk, "at_end", 0, level=rule)


def _arrivals(
    model: str, folder: Path, options: CompressOptions, reader: str, contexts: int
) -> Arrivals:
    """Compression of texts on arrival, by a process of its own with the model `model`."""
    from kvfold.jobs.compress import worker_spec
    from kvfold.jobs.processes import processes
    from kvfold.serve.vllm.arrivals import Arrivals

    return Arrivals(folder, options, processes(worker_spec(model), 1), reader, contexts)


def _model(name: str) -> tuple[str, Any, str]:
    """The path or hub id of a model, its configuration, and the dtype that kvfold loads it in.

    Raises KvfoldError if there is no such model.
    """
    from transformers import AutoConfig

    from kvfold.bundled import FOLDER

    if name == "bundled":
        return str(FOLDER), AutoConfig.from_pretrained(FOLDER), "float32"
    check_reachable(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise KvfoldError(f"cannot load {name!r}: {first_line}") from problem
    return name, config, str(config.dtype or "float32").removeprefix("torch.")
