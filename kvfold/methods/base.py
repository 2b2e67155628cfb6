# SPDX-License-Identifier: Apache-2.0
"""Names that a method's file imports: `Method`, `Stages`, and the words in which it names stages.

Texts such as "a:x=1 + b" are parsed here, and methods written as texts.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.method import Method as Method
from kvfold.methods.method import as_text, check_options, from_text
from kvfold.methods.method import called as called
from kvfold.methods.observation import Observation as Observation
from kvfold.methods.registry import plus_of, preset, registered, with_known_names
from kvfold.methods.registry import register as register
from kvfold.methods.stages.allocate.uniform import uniform as uniform
from kvfold.methods.stages.base import Across as Across
from kvfold.methods.stages.base import Heads as Heads
from kvfold.methods.stages.base import Measured as Measured
from kvfold.methods.stages.base import Schedule as Schedule
from kvfold.methods.stages.base import Score as Score
from kvfold.methods.stages.base import Select as Select
from kvfold.methods.stages.base import Stages as Stages
from kvfold.methods.stages.base import TokenPruning as TokenPruning
from kvfold.methods.stages.select.forced import Forced as Forced
from kvfold.methods.stages.select.forced import Share as Share
from kvfold.methods.stages.when import AtEnd as AtEnd
from kvfold.methods.stages.when import Hold as Hold
from kvfold.methods.stages.when import Once as Once
from kvfold.methods.stages.when import Rounds as Rounds
from kvfold.methods.stages.when import when_of as when_of
from kvfold.observers.base import Needs as Needs
from kvfold.observers.last_queries import LastQueries as LastQueries
from kvfold.store.encoding import Encode


@dataclass(frozen=True)
class AddOn(Method):
    """A method for compositions only; a subclass names one to go with, and what it `brings`."""

    takes_budget: ClassVar[bool] = False
    beside: ClassVar[str]  # a method that it goes with

    def stages(self) -> Stages:
        raise IllegalComposition(
            f"{self} evicts nothing itself: compose it with a method that does, for example "
            f'"{self.beside} + {self}"'
        )


@dataclass(frozen=True)
class Encoder(Method):
    """A method whose only stage is an encoding, which a subclass makes of its options."""

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.encoding()  # it checks the options

    def encoding(self) -> Encode:
        """The encoding; raises KvfoldError for options out of range."""
        raise NotImplementedError

    def stages(self) -> Stages:
        return Stages(encode=self.encoding())


@dataclass(frozen=True)
class Composition(Method):
    """Several methods at once; each adds stages that the others do not set."""

    parts: tuple[Method, ...] = ()
    name: ClassVar[str] = "composition"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = "several methods at once"

    @property
    def takes_budget(self) -> bool:  # type: ignore[override]
        """True if the part that sizes the layers takes a budget."""
        parts = zip(self.parts, self._brought(), strict=True)
        sizing = [(part, brought.allocate) for part, brought in parts if brought.allocate]
        unevenly = [part for part, allocate in sizing if allocate is not uniform]
        return any(part.takes_budget for part in unevenly or [part for part, _ in sizing])

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if no part mixes KV heads."""
        return all(part.by_head for part in self.parts)

    def stages(self) -> Stages:
        """Stages of all parts; raises IllegalComposition if two parts set the same stage."""
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
                # A uniform allocation yields to a part that sizes layers otherwise.
                if value is uniform and name in merged:
                    continue
                if name in owner and merged[name] is not uniform:
                    also = ", or decode=append where it is offered" if name == "when" else ""
                    stage = "decode" if name == "when" else name
                    both = f"{owner[name]} and {part} both bring the {stage} stage"
                    raise IllegalComposition(f"{both}: choose one of them{also}")
                owner[name] = part
                merged[name] = value
        # Made only here: a part of a legal composition may be illegal alone.
        stages = Stages(**merged)
        held = getattr(stages.allocate, "in_rounds", False)
        if stages.evicts_while_decoding and not self.takes_budget and not held:
            raise IllegalComposition(
                f"{self} finds its sizes without a budget, so there is none to hold while "
                "decoding: choose decode=append where it is offered"
            )
        return stages

    def _brought(self) -> list[Stages]:
        """Stages that each part adds; if none scores, a part that can adds all of its stages.

        Rounds that a part without a score names replace those of the part that scores.
        """
        brought = [part.brings() for part in self.parts]
        able = [part for part in self.parts if type(part).brings is not Method.brings]
        if able and not any(stages.score for stages in brought):
            whole = max(able, key=lambda part: part.takes_budget)
            brought[self.parts.index(whole)] = whole.stages()
        if sum(stages.score is not None for stages in brought) > 1:
            sizing = [part.brings_sizes() for part in self.parts]
            brought = [sizes or stages for sizes, stages in zip(sizing, brought, strict=True)]
        return _replaced_rounds(brought)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def spelled_out(method: Method) -> str:
    """Text with every option, from which `parse` makes this method even if defaults change."""
    if isinstance(method, Composition):
        return " + ".join(map(spelled_out, method.parts))
    options = [f"{f.name}={as_text(getattr(method, f.name))}" for f in dataclasses.fields(method)]
    return called(method) + (":" + ",".join(options) if options else "")


def is_registered(method: Method) -> bool:
    """True if another process can make the method from its `spelled_out` text."""
    return all(registered(called(part)) is type(part) for part in parts_of(method))


def origins(method: Method) -> dict[str, str]:
    """Module of each part that is not kvfold's own, by the part's name."""
    modules = {called(part): type(part).__module__ for part in parts_of(method)}
    return {name: of for name, of in modules.items() if not of.startswith("kvfold.")}


def parts_of(method: Method) -> tuple[Method, ...]:
    """The methods of a composition; of another method, itself."""
    return method.parts if isinstance(method, Composition) else (method,)


def with_part(method: Method, part: Method) -> Composition:
    """`method` composed with one more part; raises IllegalComposition for one that cannot be."""
    composed = Composition((*parts_of(method), part))
    composed.stages()
    return composed


def _set_stages(stages: Stages) -> dict[str, Any]:
    blank = Stages()
    return {
        f.name: getattr(stages, f.name)
        for f in dataclasses.fields(stages)
        if getattr(stages, f.name) != getattr(blank, f.name)
    }


def parse(spec: str | Method) -> Method:
    """Method of a text such as "snapkv:window=16,kernel=5"; "+" composes. A method is returned.

    In file names %2B stands for +, %2C for a comma, and %25 for a percent sign before two such
    digits. Raises KvfoldError for an unknown name or option, a value of the wrong kind or a number
    outside int32 or float32, and IllegalComposition if two parts add the same stage.
    """
    if isinstance(spec, Method):
        for part in parts_of(spec):
            check_options(part, called(part))
        return spec
    if isinstance(spec, type) and issubclass(spec, Method):
        raise KvfoldError(f"a method is an instance: write {spec.__name__}()")
    if not isinstance(spec, str):
        named = with_known_names(type(spec).__name__)
        known = f"write {named!r}" if registered(named) else 'write for example "snapkv:window=16"'
        raise KvfoldError(
            f"a method is a text, or an instance of a class derived from kvfold.Method, not "
            f"{str(spec)[:60]!r}: {known}"
        )
    if (named := plus_of(spec)) is not None:
        raise KvfoldError(f"an empty method name in {spec!r}, where + composes: write {named!r}")
    parts = [_parse_one(part.strip()) for part in spec.split("+")]
    for part in parts:
        check_options(part, called(part))
    if len(parts) == 1:
        return parts[0]
    composed = Composition(tuple(parts))
    composed.stages()
    return composed


def _parse_one(text: str) -> Method:
    name, _, options = text.partition(":")
    if not name:
        raise KvfoldError('an empty method name: write for example "snapkv:window=16"')
    method = preset(name.strip())
    values: dict[str, Any] = {}
    # A comma before a bare number continues a list: "skip_layers=0,-1" is "skip_layers=0/-1".
    options = re.sub(r",(?=\s*-?\d+\s*(,|$))", "/", options)
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, equals, value = (s.strip() for s in option.partition("="))
        if not equals or not value:
            raise KvfoldError(
                f"cannot read {option!r} in {text!r}: write option=value, and %2C for a comma in a "
                "file name"
            )
        values[key] = from_text(method, key, value)
    return dataclasses.replace(method, **values)


def _replaced_rounds(brought: list[Stages]) -> list[Stages]:
    """Stages of a composition's parts, where rounds without a score replace those of a score."""
    if not any(stages.rounds and stages.score is None for stages in brought):
        return brought
    return [
        dataclasses.replace(stages, when=AtEnd()) if stages.rounds and stages.score else stages
        for stages in brought
    ]
