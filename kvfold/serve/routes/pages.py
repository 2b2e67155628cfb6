# SPDX-License-Identifier: Apache-2.0
"""Ids in paths, and lists of what a pool holds, page by page."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query

from kvfold.serve.pool import Pool
from kvfold.serve.request_schemas import CONTEXT_ID
from kvfold.serve.stored import Stored, Value

NAME = Annotated[str, Path(pattern=CONTEXT_ID)]
LIMIT = Annotated[int, Query(ge=1, le=1000)]
AFTER = Annotated[str | None, Query(pattern=CONTEXT_ID)]


def page(pool: Pool[Value], limit: int, after: str | None) -> tuple[list[Stored[Value]], bool]:
    """At most `limit`, oldest first, after the one with the id `after`; True if more follow."""
    held = sorted(pool.all(), key=_age)
    if after is not None:
        first = _age(pool.get(after))
        held = [one for one in held if _age(one) > first]
    return held[:limit], len(held) > limit


def stored_fields(held: Stored[Value], model: str) -> dict[str, Any]:
    """The fields of `StoredInfo`."""
    return {
        "id": held.id,
        "created": held.created,
        "model": model,
        "method": held.stats.method,
        "budget": held.stats.budget,
        "tokens": held.stats.seen,
        "bytes": held.size,
        "bytes_full": held.stats.nbytes_full,
        "place": held.place,
    }


def _age(held: Stored[Value]) -> tuple[int, str]:
    """Sort key: creation time and id, which do not change between pages."""
    return held.created, held.id
