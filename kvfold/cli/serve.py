# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve`: an OpenAI-compatible server with compressed contexts."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvfold.cli import options
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import size
from kvfold.loading import Loading, load, shown_name
from kvfold.terminal import console, errors

if TYPE_CHECKING:
    from kvfold.serve.settings import ServerSettings

LOCAL = ("127.0.0.1", "::1", "localhost")
# Parameters that apply with --engine vllm.
OF_VLLM = (
    "model", "host", "port", "api_key", "folder", "body", "engine", "vllm", "modules", "method",
    "budget", "every", "level", "contexts", "parts", "untested_gpu",
)  # fmt: skip


@options.with_options(loading=options.loading)
def command(
    ctx: typer.Context,
    model: options.ModelName,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVFOLD_API_KEY", help="Key that clients must send; better set as a variable."
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="Default method of contexts.")] = "kvzip",
    budget: Annotated[
        str, typer.Option(help='Default budget: "512" tokens, "0.2" or "20%" of them, "2GiB".')
    ] = "0.5",
    methods: Annotated[
        str | None,
        typer.Option(
            help='Further methods that clients may name: "snapkv,kvzip".', show_default="all"
        ),
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of a text read per forward.")
    ] = 1024,
    memory: Annotated[
        str, typer.Option(help="Memory of contexts; beyond it, the least recently used go to disk.")
    ] = "4GiB",
    session_method: Annotated[
        str, typer.Option(help="Default method of agents' sessions.")
    ] = "snapkv",
    session_budget: Annotated[
        int, typer.Option(min=1, help="Default budget of sessions: tokens per KV head.")
    ] = 1024,
    session_memory: Annotated[
        str, typer.Option(help="Memory of agents' sessions; beyond it, idle ones go to disk.")
    ] = "1GiB",
    shrink: Annotated[
        str | None,
        typer.Option(help="Budget to which idle contexts shrink before any goes to disk."),
    ] = None,
    codec: options.CodecText = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of context files: read at the start, kept at the end.",
            show_default="a temporary one",
        ),
    ] = None,
    contexts: Annotated[
        int, typer.Option(min=1, help="Contexts and sessions at most, each, in memory and on disk.")
    ] = 1000,
    workers: Annotated[
        int, typer.Option(min=1, help="Requests computed at a time, each in a thread.")
    ] = 1,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a worker.")] = 64,
    body: Annotated[str, typer.Option(help="Largest body of a request.")] = "32MiB",
    values: Annotated[int, typer.Option(min=1, help="Values in the JSON of a request at most.")] = 2
    ** 18,
    connections: Annotated[int, typer.Option(min=1, help="Open connections at most.")] = 512,
    client_timeout: Annotated[
        float,
        typer.Option(help="Seconds for a client to send headers, to send a body, to read output."),
    ] = 60.0,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a text at most.", show_default="the model's own length"
        ),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 1024,
    chat_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Entries per KV head that a conversation's earlier turns keep.",
            show_default="all",
        ),
    ] = None,
    special_tokens: options.SpecialTokens = False,
    allow_longer: options.AllowLonger = False,
    capture: Annotated[
        bool,
        typer.Option(
            help="Decode by captured steps (CUDA graphs), where a method's can be captured. "
            "Not run on a GPU yet."
        ),
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for running answers to end after a stop.")
    ] = 30.0,
    shadow: Annotated[
        float,
        typer.Option(
            help="Part of the answers from contexts that are compared with a full cache's when the "
            "server is idle: 0.01."
        ),
    ] = 0.0,
    shadow_tolerance: Annotated[
        float,
        typer.Option(help="Largest mean loss of these, as --tolerance of `kvfold check`."),
    ] = 0.05,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help='Web site whose pages may use the server: "https://example.org"; "*": all. May be '
            "repeated.",
            show_default="none",
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="info: a line per request, without its texts."),
    ] = "info",
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="vllm: a stock vLLM answers from the files of --folder."),
    ] = "transformers",
    vllm: Annotated[str, typer.Option(help='Arguments for vLLM: "--max-model-len 8192".')] = "",
    level: Annotated[
        options.LevelRule | None,
        typer.Option(
            help="With vLLM: one set of tokens for all heads of texts compressed on arrival and of "
            "uneven files.",
            show_default="heads keep their own, in whole pages",
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With vLLM: --method evicts from prompts, and again after so many generated "
            "tokens.",
            show_default="once, when the prompt has been read",
        ),
    ] = None,
    untested_gpu: Annotated[
        bool,
        typer.Option(
            "--untested-gpu",
            help="With vLLM on a GPU: heads have pages of their own there, too, with "
            "FlashAttention. Tested with models of its kernels only.",
        ),
    ] = False,
    parts: Annotated[
        str | None,
        typer.Option(hidden=True, help="Until 0.2: refused, with what replaces it."),
    ] = None,
    *,
    loading: Loading,
) -> None:
    """Serve a model and compressed contexts over OpenAI's API, with transformers in process.

    Each worker answers one request after the other; requests are not batched together. Contexts
    are shared: a request costs its question and its answer. With --engine vllm only host, port,
    api-key, folder, body, import, and for prompts and texts compressed on arrival method, budget,
    every, level and contexts apply; others are refused.
    """
    from kvfold.budget import Budget
    from kvfold.codecs.codec import codec_of
    from kvfold.methods.registry import listed

    largest = int(Budget.bytes(body).amount)
    api_key = api_key and api_key.strip()  # files of secrets end with a line break
    given = options.given_options(ctx)
    if parts is not None:
        raise KvfoldError(
            "--parts is gone, as each head has pages of its own in vLLM now: compress with "
            "--method 'pyramidkv + pages'"
        )
    if engine == "vllm":
        if loading != Loading():
            raise KvfoldError("vLLM loads the model itself: give its own arguments as --vllm")
        _check_for_vllm(given)
        from kvfold.cli.serve_vllm import serve

        serve(
            model,
            host=host,
            port=port,
            api_key=api_key,
            folder=folder,
            body=largest,
            arguments=vllm,
            method=method if "method" in given else None,
            budget=budget if "budget" in given else None,
            every=every,
            level=level,
            contexts=contexts,
            untested_gpu=untested_gpu,
        )
        return
    if "shadow_tolerance" in given and not shadow:
        raise KvfoldError("--shadow-tolerance needs --shadow: the part of answers to compare")
    if vllm or level is not None or every is not None or untested_gpu:
        raise KvfoldError("--vllm, --level, --every and --untested-gpu are for --engine vllm")
    out = console()
    with out.status("importing torch and transformers"):
        try:
            from kvfold.methods.base import parse
            from kvfold.serve.engine import Engine
            from kvfold.serve.process import GracefulServer, listening
            from kvfold.serve.settings import ServerSettings
        except ModuleNotFoundError as missing:
            raise KvfoldError(
                f"serving needs {missing.name}: pip install 'kvfold[serve]'"
            ) from missing
    settings = ServerSettings(
        method=method,
        budget=budget,
        methods=None if methods is None else tuple(listed(methods)),
        prefill_chunk=prefill_chunk,
        memory=int(Budget.bytes(memory).amount),
        session_method=session_method,
        session_budget=session_budget,
        session_memory=int(Budget.bytes(session_memory).amount),
        shrink=shrink,
        folder=folder,
        codec=codec,
        contexts=contexts,
        workers=workers,
        queue=queue,
        body=largest,
        values=values,
        connections=connections,
        client_timeout=client_timeout,
        context_tokens=context_tokens,
        answer_tokens=answer_tokens,
        api_key=api_key,
        chat_budget=chat_budget,
        special_tokens=special_tokens,
        allow_longer=allow_longer,
        capture=capture,
        grace=grace,
        shadow=shadow,
        shadow_tolerance=shadow_tolerance,
        origins=tuple(allow_origin or ()),
    )
    # Refused here, before a large model is loaded.
    options.checked(method, budget if parse(method).takes_budget or "budget" in given else None)
    if codec is not None:
        codec_of(codec)
    bound = listening(host, port)
    network, tokenizer = load(model, loading)
    name = shown_name(model)
    answering = Engine(name, network, tokenizer, settings)
    for problem in chain(answering.contexts.adopt(), answering.sessions.held.adopt()):
        errors().print(f"left out: {problem}")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kvfold").setLevel(log_level.upper())
    GracefulServer(answering, lambda: _announce(bound, name, settings)).run([bound])


def _check_for_vllm(given: Mapping[str, str]) -> None:
    """Raises KvfoldError if options were `given` that have no meaning with vLLM."""
    if "shadow" in given:
        raise KvfoldError(
            "--shadow compares answers of kvfold's own server: leave it out with --engine vllm"
        )
    idle = [option for name, option in given.items() if name not in OF_VLLM]
    if idle:
        raise KvfoldError(
            f"{', '.join(idle)}: not with --engine vllm; give vLLM its own arguments as --vllm"
        )


def _announce(bound: socket.socket, name: str, settings: ServerSettings) -> None:
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    from kvfold.methods.base import parse

    within = f" within {settings.budget}" if parse(settings.method).takes_budget else ""
    console().print(
        f"{name} at http://{shown}:{port}/v1, contexts by {settings.method}{within}, "
        f"{size(settings.memory)} of them in memory",
        soft_wrap=True,
    )
    if settings.api_key is None and host not in LOCAL:
        errors().print("no API key is set: every client that reaches this address can use it")
