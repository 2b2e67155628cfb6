# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve --engine vllm`: context files served by a stock vLLM."""

from __future__ import annotations

import importlib.util
import shlex
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvfold.errors import KvfoldError
from kvfold.loading import check_reachable, shown_name
from kvfold.serve.vllm.versions import check_installed
from kvfold.terminal import console, errors

if TYPE_CHECKING:
    from kvfold.jobs.compress import CompressOptions
    from kvfold.methods.stages.select.one_set import Rule
    from kvfold.serve.vllm.arrivals import Arrivals
    from kvfold.serve.vllm.catalog import ContextCatalog
    from kvfold.serve.vllm.export import Paged

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
    every: int | None = None,
    level: Rule | None = None,
    contexts: int = 1000,
    untested_gpu: bool = False,
) -> None:
    """Serves the context files of `folder` with vLLM; `arguments` are for vLLM's command line.

    `body` bounds requests, in bytes. With a `method`, prompts are evicted from to `budget` inside
    vLLM, again after each `every` generated tokens. Texts of requests are compressed so on arrival,
    levelled by the rule `level`, and `contexts` of them kept. `untested_gpu` lets heads have pages
    of their own on a GPU. Raises KvfoldError without a folder and a method that evicts inside vLLM,
    for a missing package, another version of vLLM, a method whose texts vLLM cannot hold or an
    unsupported model, and if vLLM ends.
    """
    _check_packages()
    if method is None and any(each is not None for each in (budget, level, every)):
        raise KvfoldError("--budget, --every and --level need a method: --method snapkv")
    out = console()
    with out.status("importing torch and transformers"):
        from kvfold.methods.base import parse
        from kvfold.serve.process import listening
        from kvfold.serve.vllm.arguments import on_untested_gpu, paged_of
        from kvfold.serve.vllm.launch import VllmOptions
        from kvfold.serve.vllm.launch import serve as run
        from kvfold.serve.vllm.methods import evicting
    words = shlex.split(arguments)
    if untested_gpu:
        words = on_untested_gpu(words)
    paged, options, evicts = paged_of(words), None, None
    if method is not None:
        limit = budget or (BUDGET if parse(method).takes_budget else None)
        options = _compress_options(method, limit, level, paged)
        evicts, why = evicting(method, limit, every, paged)
        out.print(why, soft_wrap=True)
    place, config, dtype = _model(model)
    with ExitStack() as stack:
        held = _folder(folder, evicts is not None, stack)
        catalog = _catalog(held, paged, place, config, dtype, reads=options is not None)
        arrivals = None
        if options is not None:
            arrivals = _arrivals(model, catalog, options, dtype, level, contexts)
        bound = listening(host, port)
        _tell_refused(catalog)
        name = shown_name(model)
        engine = VllmOptions(place, name, dtype, held, api_key, words, paged, evicts)
        address = bound.getsockname()
        out.print(
            f"{name} at http://{address[0]}:{address[1]}/v1 once vLLM is ready, contexts of {held}",
            soft_wrap=True,
        )
        run(engine, catalog, bound, body=body, arrivals=arrivals)


def _check_packages() -> None:
    """Raises KvfoldError for a missing package, and for another version of vLLM."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KvfoldError(
            f"serving with vLLM needs {', '.join(missing)}: pip install 'kvfold[vllm]'"
        )
    check_installed()


def _folder(folder: Path | None, evicts: bool, stack: ExitStack) -> Path:
    """The folder of contexts, an own one for the server's time if it `evicts` and none is named."""
    if folder is not None:
        return folder
    if not evicts:
        raise KvfoldError(
            "name the folder of the contexts, made with `kvfold compress`: --folder PATH"
        )
    return Path(stack.enter_context(TemporaryDirectory(prefix="kvfold-")))


def _catalog(
    folder: Path, paged: Paged | None, place: str, config: Any, dtype: str, *, reads: bool
) -> ContextCatalog:
    """The contexts of a folder, for the model in `place`; with `reads` texts are read again."""
    from transformers import AutoTokenizer

    from kvfold.serve.vllm.catalog import ContextCatalog
    from kvfold.serve.vllm.meta_model import MetaModel
    from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder

    served_folder = ServedFolder(folder, paged)
    compatibility = CompatibilityCheck(served_folder, MetaModel(config, place), dtype)
    tokenizer = AutoTokenizer.from_pretrained(place)
    return ContextCatalog(served_folder, compatibility, tokenizer, reads=reads)


def _tell_refused(catalog: ContextCatalog) -> None:
    """Prints the contexts that are refused, or read again."""
    for about in catalog.all():
        if "refused" in about:
            errors().print(f"refused: {about['id']}: {about['refused']}")
        elif "uneven" in about:
            errors().print(f"uneven: {about['id']}: {about['uneven']}")


def _compress_options(
    method: str, budget: str | None, level: Rule | None, paged: Paged | None
) -> CompressOptions:
    """Compression of texts on arrival; raises KvfoldError for what vLLM cannot hold."""
    from kvfold.cli.options import checked
    from kvfold.jobs.compress import CompressOptions
    from kvfold.serve.settings import ServerSettings
    from kvfold.serve.vllm.methods import fitting

    chosen, limit = checked(method, budget)
    # A method that prunes tokens between layers reads its text in one forward.
    chunk = None if chosen.stages().token_pruning else ServerSettings.prefill_chunk
    fitted, rule = fitting(chosen, level, paged)
    return CompressOptions(fitted, limit, chunk, "at_end", 0, level=rule)


def _arrivals(
    model: str,
    catalog: ContextCatalog,
    options: CompressOptions,
    dtype: str,
    level: Rule | None,
    contexts: int,
) -> Arrivals:
    """Compression of texts on arrival, by a process of its own with the model `model`."""
    from kvfold.jobs.compress import worker_spec
    from kvfold.jobs.processes import processes
    from kvfold.serve.vllm.arrivals import Arrivals
    from kvfold.serve.vllm.methods import LEVEL

    served_folder = catalog.served_folder
    reader = f"{catalog.compatibility.meta_model.identity(dtype)} {catalog.vocabulary}"
    shape = level or (LEVEL if served_folder.paged is None else served_folder.paged.block)
    run = processes(worker_spec(model), 1)
    return Arrivals(served_folder.folder, options, run, reader, shape, contexts)


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
