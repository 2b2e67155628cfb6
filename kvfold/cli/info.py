# SPDX-License-Identifier: Apache-2.0
"""`kvfold info`: the header of a context file, read without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.console import kept_per_layer
from kvfold.cli.options import Json
from kvfold.evidence.tables import size, table
from kvfold.terminal import console, messages, print_json

if TYPE_CHECKING:
    from kvfold.contexts.files.header import Header


def command(
    context: Annotated[Path, typer.Argument(help="A file written by `kvfold compress`.")],
    as_json: Json = False,
) -> None:
    """Show the header of a context file: method, kept entries, and model."""
    with messages(as_json).status("importing torch"):
        from kvfold.contexts.files.format import opened
    with opened(context) as file:
        header, nbytes, cold = file.header, file.size, file.cold_bytes()
    if as_json:
        of_file = {"bytes": nbytes, "cold_bytes": cold}
        print_json({**of_file, **header.model_dump(exclude={"checksums"})})
        return
    rows = [*_content(header), ("bytes of the file", size(nbytes))]
    if cold:
        rows.append(("cold bytes of these", size(cold)))
    console().print(table(str(context), "what", "value", rows=rows))


def _content(header: Header) -> list[tuple[str, str]]:
    budget = "none" if header.budget is None else f"{header.budget.amount:g} {header.budget.kind}"
    bits = "" if header.bits is None else ", packed into {} and {} bits".format(*header.bits)
    rope = header.rope.parameters.get("rope_type", "as in the configuration")
    rows = [
        ("method", header.method),
        ("budget", budget),
        ("seed", str(header.seed)),
        ("tokens", f"{header.seen:,}"),
    ]
    kept = kept_per_layer(
        [layer.index for layer in header.layers], [[layer.kept] for layer in header.layers]
    )
    rows += [(f"kept in {name}", count) for name, count in kept]
    rows += [(f"layer {other.index}", f"{other.kind}, as it is") for other in header.others]
    if header.per_chunk is not None:
        rows.append(("compressed", f"after each {header.per_chunk:,} tokens"))
    if header.system is not None:
        rows.append(("system message", header.system))
    rows += [(f"template's {name}", f"{value!r:.200}") for name, value in header.arguments.items()]
    rows += [
        ("keys and values", header.dtype + bits),
        ("model", f"{header.model.name}, configuration {header.model.config_hash}"),
        ("RoPE", f"{rope}, keys moved by {header.rope.moved}"),
        ("written by", f"kvfold {header.written_by}"),
    ]
    return rows
