# SPDX-License-Identifier: Apache-2.0
"""What a method is: a frozen dataclass that names its stages; "a:x=1 + b" strings."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.observation import Needs, Observation
from kvfold.methods.registry import preset, registered
from kvfold.methods.registry import register as register
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.merge.base import MergeOneStage, MergeStage
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.select.forced import Forced
from kvfold.store.encoding import Encode


class FileName(str):
    """An option that names a file, "none" for no file; clients of a server may not give one."""


# Of the options of methods: more tokens than any text has, and what scores are computed in.
LARGEST = {int: 2**31 - 1, float: torch.finfo(torch.float32).max}

# Observation → scores [B, H, T], higher = keep
Score = Callable[[Observation], Tensor]
# Observation of a layer's attention to every token → slots [B, K] of those the next layer computes
TokenPruning = Callable[[Observation], Tensor]
# (scores [B, H, T], forced [B, H, T], positions [B, H, T] with −1 for padding, entries to keep
# [B, H], forced ones included) → slots [B, H, K] ascending, −1 for holes
Select = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (total entries over all layers, tokens seen, layers) → entries per layer
Schedule = Callable[[int, int, int], list[int]]
# (scores [B, H, T] with −inf for what is no candidate, entries per head [B]) → [B, H]
Heads = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """Each layer's size comes from what it observed, without a budget.

    `size`: Observation → `[B]`, or `[B, H]` with `per_head`; forced entries count. `error` turns
    what was observed and what stays `[B, H, T]` into the relative error `[B, 1 or 2]` of the
    layer's output, predicted and measured.
    """

    size: Callable[[Observation], Tensor]
    error: Callable[[Observation, Tensor], Tensor] | None = None
    per_head: bool = False


@dataclass(frozen=True)
class Across:
    """Sizes that need every layer first.

    `statistic` turns an Observation into whatever `share` needs of a layer; `share` takes all
    layers' statistics, the budget per head and layer `[B]` and the tokens seen `[B]`, and returns
    each layer's entries per head, `[B]`, or `[B, H]` with `per_head`. The budget is whole entries,
    int64; with `unrounded` it is what it was before it was rounded down, float64. A layer that gets
    `UNLIMITED` (methods/stages/allocate/rounding.py) is never compressed.
    """

    statistic: Callable[[Observation], Tensor]
    share: Callable[[list[Tensor], Tensor, Tensor], list[Tensor]]
    per_head: bool = False
    unrounded: bool = False


@dataclass(frozen=True)
class Stages:
    """The stages a method sets; what it leaves at None or at its default it does not do.

    `score` None keeps every entry. `allocate` sizes the layers, evenly where it is None beside a
    score; `heads` shares a layer's size among its heads. `select` turns scores and counts into
    slots, where it is not the highest scores that stay. `merge` saves something of what is
    evicted, and `merge_one` the same, cheaply, of the one entry that leaves while decoding.
    `encode` is how entries are stored.
    `decode` "hold" runs the same stages after every generated token and keeps the size reached at
    the end of the prefill; "once" compresses at the first generated token instead of the prefill's
    end; "append" lets generated tokens come on top. `positions` "reindex" lets the sinks move up to
    the recent tokens, as StreamingLLM does. `token_pruning` runs
    between the layers of a forward.
    `inexact` says why the entries kept differ from the budget, where they do.
    `method` is the text of the method that they are of, which a cache fills in.
    """

    needs: Needs = field(default_factory=Needs)
    score: Score | None = None
    allocate: Schedule | Measured | Across | None = None
    heads: Heads | None = None
    select: Select | None = None
    forced: Forced = field(default_factory=Forced)
    merge: MergeStage | None = None
    merge_one: MergeOneStage | None = None
    encode: Encode | None = None
    decode: Literal["append", "hold", "once"] = "append"
    positions: Literal["original", "reindex"] = "original"
    token_pruning: TokenPruning | None = None
    inexact: str = ""
    method: str = ""

    def __post_init__(self) -> None:
        if self.score is not None and self.allocate is None:
            object.__setattr__(self, "allocate", uniform)
        if self.decode == "once" and self.needs.window > 1:
            raise IllegalComposition(
                "what compresses at the first generated token sees the query of that token alone, "
                f"and {self.needs.window} are needed: choose one that compresses at the prompt's "
                "end, such as simlayerkv:when=last_query"
            )
        if self.decode == "hold" and self.encode is not None:
            raise IllegalComposition(
                "what is stored encoded cannot be evicted entry by entry, so a method that evicts "
                "while decoding cannot be followed by it: choose decode=append where it is offered"
            )
        if self.decode == "hold" and self.heads is not None:
            raise IllegalComposition(
                "budgets per head are set when a prefill ends, so they do not go with a method "
                "that evicts while decoding: choose decode=append where it is offered"
            )
        if self.decode == "hold" and self.select is not None:
            raise IllegalComposition(
                "entries that leave one by one while decoding are those of lowest score, so a "
                "method that selects otherwise does not go with a method that evicts while "
                "decoding: choose decode=append where it is offered"
            )
        if self.positions == "reindex" and (self.encode or self.heads):
            raise IllegalComposition(
                "re-indexed positions rotate stored keys, which must then be whole and dense: "
                'choose positions="original"'
            )
        if self.heads is not None and getattr(self.allocate, "per_head", False):
            raise IllegalComposition(
                "each head has a size of its own already: leave out one of the two methods"
            )
        if self.encode is not None and self.encode.pairs and not self._same_in_all_heads():
            raise IllegalComposition(
                "two layers are stored as a pair, so all their heads must keep the same entries: "
                "choose one that goes by position, such as streaming_llm_original:decode=append"
            )
        if self.token_pruning is not None and (self.score is not None or self.encode is not None):
            raise IllegalComposition(
                "tokens are pruned between the layers of the prompt's forward and stored as they "
                "come: nothing else selects or encodes them, so use that method alone"
            )

    @property
    def runs_own_forwards(self) -> bool:
        """True for methods whose own forwards read a first prompt (KVzip, PyramidInfer)."""
        return self.token_pruning is not None or self.needs.reconstruction is not None

    def _same_in_all_heads(self) -> bool:
        evenly = self.allocate is uniform and self.heads is None
        return self.score is None or (self.score is recency and evenly)


@dataclass(frozen=True)
class Method:
    """Base of all methods: a frozen dataclass of the paper's hyper-parameters, without state."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    takes_budget: ClassVar[bool] = True
    # A KV head's scores, its statistic, and what is saved of its entries come from it alone.
    by_head: ClassVar[bool] = False

    def stages(self) -> Stages:
        """The stages of this method."""
        raise KvfoldError(f"{type(self).__name__} names no stages")

    def brings(self) -> Stages:
        """The stages it adds to other methods in a composition."""
        return self.stages()

    def sizes(self) -> Stages | None:
        """The stages it adds where another method selects; None: it goes with no other one."""
        return None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [
            f"{f.name}={_as_text(values[f.name])}"
            for f in dataclasses.fields(self)
            if values[f.name] != f.default
        ]
        return called(self) + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True)
class Composition(Method):
    """Several methods, each bringing stages that the others leave free."""

    parts: tuple[Method, ...] = ()
    name: ClassVar[str] = "composition"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "several methods at once"

    @property
    def takes_budget(self) -> bool:  # type: ignore[override]
        """Whether the part that sizes the layers does."""
        parts = zip(self.parts, self._brought(), strict=True)
        sizing = [(part, brought.allocate) for part, brought in parts if brought.allocate]
        unevenly = [part for part, allocate in sizing if allocate is not uniform]
        return any(part.takes_budget for part in unevenly or [part for part, _ in sizing])

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """Whether all parts are."""
        return all(part.by_head for part in self.parts)

    def stages(self) -> Stages:
        """All parts' stages; raises IllegalComposition where two parts set the same one."""
        merged: dict[str, Any] = {"needs": Needs()}
        owner: dict[str, Method] = {}
        for part, brought in zip(self.parts, self._brought(), strict=True):
            for name, value in _set_stages(brought).items():
                if name == "needs":
                    merged[name] = merged[name].joined(value)
                    continue
                if name == "inexact" and name in merged:
                    merged[name] += f"; {value}"
                    continue
                # Even sizes give way to a part that sizes layers.
                if value is uniform and name in merged:
                    continue
                if name in owner and merged[name] is not uniform:
                    raise IllegalComposition(
                        f"{owner[name]} and {part} both bring the {name} stage: choose one of them"
                    )
                owner[name] = part
                merged[name] = value
        if merged.get("decode") == "hold" and not self.takes_budget:
            raise IllegalComposition(
                f"{self} finds its sizes without a budget, so there is none to hold while "
                "decoding: choose decode=append where it is offered"
            )
        # All at once: half of a composition may be illegal where the whole is not.
        return Stages(**merged)

    def _brought(self) -> list[Stages]:
        """What each part brings; where none of it scores, a part that can score comes whole."""
        brought = [part.brings() for part in self.parts]
        able = [part for part in self.parts if type(part).brings is not Method.brings]
        if able and not any(stages.score for stages in brought):
            whole = max(able, key=lambda part: part.takes_budget)
            brought[self.parts.index(whole)] = whole.stages()
        if sum(stages.score is not None for stages in brought) > 1:
            sizing = [part.sizes() for part in self.parts]
            brought = [sizes or stages for sizes, stages in zip(sizing, brought, strict=True)]
        return brought

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def called(method: Method) -> str:
    """The method's registered name, not one that its class inherits; else the class's own."""
    return str(vars(type(method)).get("name") or type(method).__name__)


def spelled_out(method: Method) -> str:
    """The text from which `parse` makes this method even when defaults have changed."""
    if isinstance(method, Composition):
        return " + ".join(map(spelled_out, method.parts))
    options = [f"{f.name}={_as_text(getattr(method, f.name))}" for f in dataclasses.fields(method)]
    return called(method) + (":" + ",".join(options) if options else "")


def is_registered(method: Method) -> bool:
    """Whether `spelled_out` gives a text from which another process can make the method."""
    return all(registered(called(part)) is type(part) for part in _parts(method))


def origins(method: Method) -> dict[str, str]:
    """The modules of those of its parts that are not kvfold's own, by the parts' names."""
    modules = {called(part): type(part).__module__ for part in _parts(method)}
    return {name: of for name, of in modules.items() if not of.startswith("kvfold.")}


def _parts(method: Method) -> tuple[Method, ...]:
    return method.parts if isinstance(method, Composition) else (method,)


def _as_text(value: Any) -> str:
    return "/".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _set_stages(stages: Stages) -> dict[str, Any]:
    blank = Stages()
    return {
        f.name: getattr(stages, f.name)
        for f in dataclasses.fields(stages)
        if getattr(stages, f.name) != getattr(blank, f.name)
    }


def parse(spec: str | Method) -> Method:
    """A method from a text such as "snapkv:window=16,kernel=5"; "+" composes.

    Raises KvfoldError for an unknown name or option, a value of the wrong kind or a number that no
    tensor holds, and IllegalComposition where two parts bring the same stage.
    """
    if isinstance(spec, Method):
        _check_numbers(spec)
        return spec
    if isinstance(spec, type) and issubclass(spec, Method):
        raise KvfoldError(f"a method is an instance: write {spec.__name__}()")
    parts = [_parse_one(part.strip()) for part in str(spec).split("+")]
    for part in parts:
        _check_numbers(part)
    if len(parts) == 1:
        return parts[0]
    composed = Composition(tuple(parts))
    composed.stages()
    return composed


def _check_numbers(method: Method) -> None:
    """Raises KvfoldError, naming the option, for a number that int32 or float32 does not hold."""
    for part in _parts(method):
        for option in dataclasses.fields(part):
            value = getattr(part, option.name)
            for number in value if isinstance(value, tuple) else (value,):
                most = LARGEST.get(type(number))
                if most is not None and not abs(number) <= most:
                    raise KvfoldError(
                        f"{called(part)}:{option.name} is a number from {-most:g} to {most:g}, "
                        f"not {number:.3g}"
                    )


def listed(text: str) -> list[str]:
    """The methods in "snapkv:window=16,kernel=5, knorm:skip_layers=0,1, h2o + merge".

    A comma parts methods where a name follows it, and not an option or a number.
    """
    parts = re.split(r",(?=\s*[a-z]\w*\s*(?:[:,+]|$))", text)
    found = (re.sub(r"\s+,", ",", part.strip(" ,")) for part in parts)
    return [part for part in found if part]


def _parse_one(text: str) -> Method:
    name, _, options = text.partition(":")
    if not name:
        raise KvfoldError('an empty method name: write for example "snapkv:window=16"')
    method = preset(name.strip())
    values: dict[str, Any] = {}
    # A comma before a bare number goes on with a list: "skip_layers=0,1" is "skip_layers=0/1".
    options = re.sub(r",(?=\s*\d+\s*(,|$))", "/", options)
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, equals, value = (s.strip() for s in option.partition("="))
        if not equals or not value:
            raise KvfoldError(f"cannot read {option!r} in {text!r}: write option=value")
        values[key] = _convert(method, key, value)
    return dataclasses.replace(method, **values)


def _convert(method: Method, option: str, text: str) -> Any:
    kinds = typing.get_type_hints(type(method))
    known = [f.name for f in dataclasses.fields(method)]
    if option not in known:
        raise KvfoldError(
            f"{method.name} has no option {option!r}; it has {', '.join(known) or 'none'}"
        )
    kind = kinds[option]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
    try:
        if choices is not None:
            return next(choice for choice in choices if str(choice) == text)
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        if typing.get_origin(kind) is tuple:
            return () if text == "none" else tuple(int(item) for item in text.split("/"))
        return kind(text)
    except (ValueError, KeyError, StopIteration):
        wanted = " or ".join(map(str, choices)) if choices else getattr(kind, "__name__", str(kind))
        raise KvfoldError(f"{method.name}:{option} takes {wanted}, not {text!r}") from None
