# SPDX-License-Identifier: Apache-2.0
"""`kvfold run`: generation with a model, a method and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvfold.cache.stats import OVER_BUDGET
from kvfold.cli import options
from kvfold.cli.console import kept_per_layer, stats_json
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import seconds, size, table
from kvfold.loading import Loading, load
from kvfold.terminal import console, messages, print_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvfold.cache.stats import Stats
    from kvfold.cli.streamed_answer import TokenTimer


@options.with_options(loading=options.loading, sampling=options.sampling)
def command(
    model: options.ModelName,
    method: options.MethodText = "snapkv",
    budget: options.BudgetText = None,
    prompt: options.TextOption = None,
    file: options.TextFile = None,
    encoding: options.Encoding = "utf-8",
    system: options.SystemText = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Put the prompt into the chat template.", show_default="if there is one"),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Generated tokens after which the cache is back at its size."),
    ] = None,
    max_cache_tokens: Annotated[
        int | None, typer.Option(min=2, help="Most entries per layer and KV head while answering.")
    ] = None,
    prefill_chunk: options.PrefillChunk = None,
    compress: options.Compress = "at_end",
    special_tokens: options.SpecialTokens = False,
    allow_longer: options.AllowLonger = False,
    template: options.TemplateArguments = None,
    as_json: options.Json = False,
    *,
    loading: Loading,
    sampling: options.SamplingOptions,
) -> None:
    """Generate with a compressed cache; print kept entries, bytes and times.

    The answer is streamed; Ctrl-C ends it.
    """
    text, arguments = options.text_of(prompt, file, encoding), options.template_arguments(template)
    if text is None:
        raise KvfoldError("give the prompt as --prompt TEXT or as --file PATH")
    notes = messages(as_json)
    with notes.status("importing torch and transformers"):
        import kvfold
        from kvfold.cli.streamed_answer import streamed_answer
        from kvfold.generation.pieces import check_per_chunk
    # Refused here, before a large model is loaded.
    chosen, limit = options.checked(method, budget, every, max_cache_tokens)
    if compress == "per_chunk":
        check_per_chunk(chosen, prefill_chunk)
    # transformers shows its own progress.
    network, tokenizer = load(model, loading, among_ranks=True)
    ids = encode(tokenizer, text, chat, system, special_tokens, arguments).to(network.device)
    cache = kvfold.CompressedCache(network, chosen, limit, tokenizer=tokenizer, seed=sampling.seed)
    out = console()
    put = (lambda piece: None) if as_json else (lambda piece: show(out, piece))
    said, clock = streamed_answer(
        network,
        tokenizer,
        ids,
        cache,
        notes,
        put,
        prefill_chunk=prefill_chunk,
        compress=compress,
        max_new_tokens=max_new_tokens,
        allow_longer=allow_longer,
        **sampling.options(),
    )
    stats = cache.stats()
    if as_json:
        took = {"first_token": clock.first_token, "per_token": clock.per_token}
        print_json({"answer": said, "stats": stats_json(stats), "seconds": took})
        return
    out.print()
    out.print(costs(stats, clock))


def show(out: Any, piece: str) -> None:
    """Prints a piece of an answer, without wrapping or markup."""
    out.print(Text(piece), end="", soft_wrap=True)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    chat: bool | None,
    system: str | None = None,
    special_tokens: bool = False,
    template: Mapping[str, Any] | None = None,
) -> Tensor:
    """Token ids `[1, N]` of a prompt, inside the chat template.

    Without one, or with `chat=False`, the prompt stands alone. Special tokens spelled in the texts
    stay text, unless `special_tokens`. `template` are the template's arguments. Raises KvfoldError
    if `chat`, `system` or `template` needs a template and there is none, if the template takes no
    system message, and for arguments that it does not read.
    """
    import torch

    from kvfold.hf.chat_template import PromptFrame
    from kvfold.hf.template_arguments import check_spelled, json_arguments
    from kvfold.hf.user_text import content, ids_of, own_tokens, segment_ids

    wrapped = bool(tokenizer.chat_template) if chat is None else chat
    if wrapped and not tokenizer.chat_template:
        raise KvfoldError("this tokenizer has no chat template: use --no-chat")
    if system is not None and not wrapped:
        raise KvfoldError("a system message needs the chat template: leave out --system")
    if template and not wrapped:
        raise KvfoldError("arguments of the chat template need it: leave out --template")
    said = content(text, special_tokens)
    if system is not None:
        given = json_arguments(tokenizer, template or {})
        if not special_tokens:
            check_spelled(tokenizer, None, given)
        parts = _after_system(tokenizer, content(system, special_tokens), said, given)
        ids = ids_of(tokenizer, *parts) if special_tokens else segment_ids(tokenizer, parts)
    elif wrapped:
        frame = PromptFrame.of(tokenizer, None, template, special_tokens)
        ids = ids_of(tokenizer, frame.before, said, frame.after)
    else:
        first, last = own_tokens(tokenizer)
        ids = [*first, *ids_of(tokenizer, said), *last]
    return torch.tensor([ids], dtype=torch.long)


def _after_system(
    tokenizer: PreTrainedTokenizerBase, system: str, text: str, template: Mapping[str, Any]
) -> list[str]:
    """Segments of a prompt after a system message; KvfoldError if the template takes none."""
    from kvfold.hf.chat_template import conversation

    parts = conversation(tokenizer, [("system", system), ("user", text)], template)
    said = system.strip()
    if "".join(parts).count(said) == text.count(said):
        raise KvfoldError("this chat template drops system messages: leave out --system")
    return parts


def costs(stats: Stats, clock: TokenTimer) -> Table:
    """Table of kept entries, bytes and times."""
    rows = [("tokens seen", f"{stats.seen:,}")]
    rows += [(f"kept in {name}", count) for name, count in kept_per_layer(stats.layers, stats.kept)]
    rows += [
        ("kept of all entries", f"{stats.kept_fraction:.1%}"),
        ("bytes", size(stats.nbytes)),
        ("bytes of a full cache", size(stats.nbytes_full)),
        ("ratio of bytes", f"{stats.ratio:.1%}"),
        *([("bytes of other layers", size(stats.other_bytes))] if stats.other_layers else []),
        *([("cold bytes beside them", size(sum(stats.cold[:2])))] if any(stats.cold) else []),
        ("prefill and first token", seconds(clock.first_token)),
        ("per generated token", "-" if clock.per_token is None else seconds(clock.per_token)),
    ]
    title = f"{stats.method}, budget {stats.budget}"
    shown = table(title, "what", "measured", right=["measured"], rows=rows)
    shown.caption = "counted after the last token"
    if stats.forced_over_budget:
        shown.caption += f"; {OVER_BUDGET}"
    return shown
