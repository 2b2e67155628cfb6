# SPDX-License-Identifier: Apache-2.0
"""Registry of methods by name: kvfold's own, those of plugins, and those of imported modules."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import re
import sys
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules
from threading import Lock
from types import ModuleType
from typing import Any, TypeVar

from kvfold.errors import KvfoldError
from kvfold.methods.method import Method
from kvfold.reading import opened_regular

# Package of kvfold's own methods
OWN = "kvfold.methods"
# Methods by the names that kvpress and transformers have for them, where kvfold has others
ELSEWHERE: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("elsewhere.toml").read_text("utf-8")
)
# Entry-point group: its entries name modules, or classes in them, that register methods
PLUGINS = "kvfold.methods"

# A method's name in a text, however it is spelled
NAME = r"[A-Za-z][\w-]*(?: [\w-]+)*"

M = TypeVar("M", bound="type[Method]")


@dataclass(frozen=True)
class Entry:
    """One registered name: a method class and, for a preset, the option values that differ."""

    cls: type[Method]
    values: dict[str, Any] = field(default_factory=dict)


_REGISTRY: dict[str, Entry] = {}
_IMPORTED: list[str] = []
_own_loaded = False
_loading = Lock()


def register(
    name: str,
    *,
    paper: str = "",
    formula: str = "",
    presets: dict[str, dict[str, Any]] | None = None,
) -> Callable[[M], M]:
    """Class decorator that registers a method as `name`, and each preset as `name_preset`.

    The class is a frozen dataclass derived from `Method`, whose fields all have defaults; the first
    line of its docstring is its summary. `paper` is for example "arXiv 2404.14469". `formula` says
    in a few lines what is kept, or how it is stored; its indentation is removed. Raises KvfoldError
    for any other class, and for a name that another class has. A class that is defined again, as by
    a reload, replaces its earlier self.
    """
    if not isinstance(name, str):
        raise KvfoldError('register takes the name first: write @register("my_method")')

    def add(cls: M) -> M:
        entries = {name: Entry(cls)}
        entries |= {f"{name}_{of}": Entry(cls, values) for of, values in (presets or {}).items()}
        _check_class(name, cls)
        if not cls.__module__.startswith(f"{OWN}."):
            _load_own()  # so that no other class can take the name of an own method first
        for each in entries:
            _check_name(each, cls)
        cls.name, cls.paper, cls.summary = name, paper, _summary(cls)
        cls.formula = inspect.cleandoc(formula)
        _REGISTRY.update(entries)
        return cls

    return add


def list_methods() -> dict[str, type[Method]]:
    """Every registered name and its method class, presets and plugins included."""
    _load_plugins()
    return {name: entry.cls for name, entry in sorted(_registry().items())}


def preset(name: str) -> Method:
    """The method registered as `name`, with its preset's values; KvfoldError if unknown.

    Case, hyphens, underscores and a "Press" at the end make no difference.
    """
    entry = _registry()[meant(name)]
    return entry.cls(**entry.values)


def meant(name: str) -> str:
    """The registered name that a spelling such as "SnapKVPress" means; KvfoldError if unknown."""
    if (known := _known(name)) in _registry():
        return known
    by_letters = {_letters(each): each for each in _registry()}
    bare = _letters(name.partition("(")[0]).removesuffix("press")
    meant_by = by_letters | ELSEWHERE
    near = [bare] if bare in meant_by else difflib.get_close_matches(bare, by_letters, n=3)
    named = " or ".join(repr(meant_by[each]) for each in near)
    raise KvfoldError(
        f"unknown method {name!r}: {f'did you mean {named}? ' if near else ''}`kvfold methods` "
        "lists them, and --import MODULE (kvfold.register) adds your own"
    )


def _known(name: str) -> str:
    """The registered name of the same letters, without a "Press" at the end; else `name`."""
    if registered(name) is not None:
        return name
    by_letters = {_letters(each): each for each in _registry()}
    bare = by_letters.get(_letters(name).removesuffix("press"), name)
    return by_letters.get(_letters(name), bare)


def _letters(name: str) -> str:
    """Letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", name).lower()


def registered(name: str) -> type[Method] | None:
    """The class registered as `name`, plugins included; None if there is none."""
    if name not in _registry():
        _load_plugins()
    entry = _registry().get(name)
    return None if entry is None else entry.cls


def listed(text: str) -> list[str]:
    """Method texts in a list such as "snapkv:window=16,kernel=5, knorm:skip_layers=0,1, h2o".

    A comma separates methods if a method's name follows it, not an option or a number. Names are
    those registered, however they are spelled.
    """
    parts = re.split(rf",(?=\s*{NAME}\s*(?:[:,+]|$))", text)
    found = (re.sub(r"\s+,", ",", part.strip(" ,")) for part in parts)
    return [with_known_names(part) for part in found if part]


def with_known_names(text: str) -> str:
    """A method's text such as "SnapKV:window=16 + every", in registered names; others stay."""
    return re.sub(rf"(?<![^+])(\s*)({NAME})", lambda part: part[1] + _known(part[2]), text)


def plus_of(text: str) -> str | None:
    """The preset `NAME_plus` where a text has `NAME+`, as "KVzip+"; None without one."""
    for found in re.finditer(rf"({NAME})\+\s*(?=\+|$)", text):
        if registered(named := f"{_known(found[1])}_plus") is not None:
            return named
    return None


def import_methods(module: str) -> None:
    """Imports a module, by its name or the path of a .py file, so that it registers its methods.

    Names are looked up in the working directory too. Raises KvfoldError if the module is not found,
    fails, or registers nothing.
    """
    before, loaded = set(_registry()), set(sys.modules)
    try:
        imported = _from_file(Path(module)) if module.endswith(".py") else _by_name(module)
    except KvfoldError:
        raise
    except Exception as problem:
        raise KvfoldError(f"cannot import {module}: {_in_a_line(problem)}") from problem
    if set(_registry()) == before and imported.__name__ not in loaded:
        raise KvfoldError(
            f"{module} registers no method: decorate a class with @kvfold.register(name)"
        )
    found = str(Path(module).resolve()) if module.endswith(".py") else module
    if found not in _IMPORTED:
        _IMPORTED.append(found)


def imported_methods() -> tuple[str, ...]:
    """Modules and absolute paths given to `import_methods`, for other processes to import too."""
    return tuple(_IMPORTED)


def _registry() -> dict[str, Entry]:
    """Every registered name, once kvfold's own methods are loaded."""
    _load_own()
    return _REGISTRY


def _load_own() -> None:
    """Imports every module of kvfold's own methods, which register themselves."""
    global _own_loaded
    with _loading:
        if _own_loaded:
            return
        for module in iter_modules(import_module(OWN).__path__):
            if not module.ispkg:
                import_module(f"{OWN}.{module.name}")
        _own_loaded = True


def _check_class(name: str, cls: type) -> None:
    """Raises KvfoldError for a class or a name that `register` does not accept."""
    reason = None
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        reason = "its name must be of lower-case letters, digits and _, a letter first"
    elif not (isinstance(cls, type) and issubclass(cls, Method)):
        reason = "it must be derived from kvfold.Method"
    elif "__dataclass_params__" not in vars(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        reason = "put @dataclass(frozen=True) directly below @register"
    elif vars(cls).get("name", name) != name:
        reason = f"it is registered as {vars(cls)['name']!r}: presets= gives it further names"
    else:
        bare = [f.name for f in dataclasses.fields(cls) if not _has_default(f)]
        reason = f"give a default to {', '.join(bare)}" if bare else None
    if reason is not None:
        raise KvfoldError(f"cannot register {cls!r} as {name!r}: {reason}")


def _has_default(option: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return option.default is not missing or option.default_factory is not missing


def _summary(cls: type) -> str:
    """First line of the class's docstring; its name if it has only a dataclass's own docstring."""
    text = (cls.__doc__ or "").strip()
    return (
        text.splitlines()[0] if text and not text.startswith(f"{cls.__name__}(") else cls.__name__
    )


def _check_name(name: str, cls: type[Method]) -> None:
    """Raises KvfoldError if `name` belongs to another class."""
    held = _REGISTRY.get(name)
    if held is not None and _defined_at(held.cls) != _defined_at(cls):
        raise KvfoldError(
            f"the method name {name!r} is taken by {'.'.join(_defined_at(held.cls))}: choose "
            f"another one for {'.'.join(_defined_at(cls))}"
        )


def _defined_at(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


@cache
def _load_plugins() -> None:
    """Loads the methods of installed packages, once; warns about a plugin that fails."""
    for plugin in metadata.entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as problem:
            package = plugin.dist.name if plugin.dist else "an unknown package"
            warnings.warn(
                f"the methods of the plugin {plugin.name!r} ({plugin.value} of {package}) are "
                f"left out, as it cannot be loaded: {_in_a_line(problem)}",
                stacklevel=3,
            )


def _by_name(module: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return import_module(module)


def _from_file(path: Path) -> ModuleType:
    """Module of a file, imported under the file's stem; KvfoldError if that name is taken."""
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "") == path.resolve():
            return known
        raise KvfoldError(f"cannot import {path}: a module {path.stem} exists, rename the file")
    with opened_regular(path):  # a pipe would be waited for
        pass
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _in_a_line(problem: Exception) -> str:
    first = str(problem).strip().partition("\n")[0]
    return f"{type(problem).__name__}: {first}" if first else type(problem).__name__
