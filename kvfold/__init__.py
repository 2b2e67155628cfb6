# SPDX-License-Identifier: Apache-2.0
"""kvfold: a KV cache that stays small. The names here are the public ones.

Each is imported when it is first asked for, so that `import kvfold` needs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.budget import Budget as Budget
    from kvfold.bundled import bundled_model as bundled_model
    from kvfold.cache import CompressedCache as CompressedCache
    from kvfold.compat import disable as disable
    from kvfold.compat import enable as enable
    from kvfold.context import Context as Context
    from kvfold.context import compress as compress
    from kvfold.errors import BudgetError as BudgetError
    from kvfold.errors import ContextFileError as ContextFileError
    from kvfold.errors import IllegalComposition as IllegalComposition
    from kvfold.errors import KvfoldError as KvfoldError
    from kvfold.errors import UnsupportedModel as UnsupportedModel
    from kvfold.eval.evaluate import evaluate as evaluate
    from kvfold.files.read import load as load
    from kvfold.generate import generate as generate
    from kvfold.method import Across as Across
    from kvfold.method import Measured as Measured
    from kvfold.method import Method as Method
    from kvfold.method import Stages as Stages
    from kvfold.method import parse as parse
    from kvfold.methods.adakv import AdaKV as AdaKV
    from kvfold.methods.auto import Auto as Auto
    from kvfold.methods.cam import CaM as CaM
    from kvfold.methods.d2o import D2O as D2O
    from kvfold.methods.dbudgetkv import DBudgetKV as DBudgetKV
    from kvfold.methods.full import Full as Full
    from kvfold.methods.h2o import H2O as H2O
    from kvfold.methods.kivi import KIVI as KIVI
    from kvfold.methods.knorm import KNorm as KNorm
    from kvfold.methods.kvzip import KVzip as KVzip
    from kvfold.methods.local_window import LocalWindow as LocalWindow
    from kvfold.methods.merge import Merge as Merge
    from kvfold.methods.minicache import MiniCache as MiniCache
    from kvfold.methods.pyramidinfer import PyramidInfer as PyramidInfer
    from kvfold.methods.pyramidkv import PyramidKV as PyramidKV
    from kvfold.methods.random import Random as Random
    from kvfold.methods.roco import RoCo as RoCo
    from kvfold.methods.simlayerkv import SimLayerKV as SimLayerKV
    from kvfold.methods.snapkv import SnapKV as SnapKV
    from kvfold.methods.streaming_llm import StreamingLLM as StreamingLLM
    from kvfold.methods.think import ThinK as ThinK
    from kvfold.methods.tova import TOVA as TOVA
    from kvfold.observation import Needs as Needs
    from kvfold.observation import Observation as Observation
    from kvfold.registry import list_methods as list_methods
    from kvfold.registry import methods as methods
    from kvfold.registry import register as register
    from kvfold.select.forced import Forced as Forced
    from kvfold.spans import span as span
    from kvfold.stats import Stats as Stats

__version__ = "0.1.0"

# Public names by the module that defines them; the imports above say the same to type checkers.
_NAMES = {
    "kvfold.budget": ("Budget",),
    "kvfold.bundled": ("bundled_model",),
    "kvfold.cache": ("CompressedCache",),
    "kvfold.compat": ("disable", "enable"),
    "kvfold.context": ("Context", "compress"),
    "kvfold.errors": (
        "BudgetError",
        "ContextFileError",
        "IllegalComposition",
        "KvfoldError",
        "UnsupportedModel",
    ),
    "kvfold.eval.evaluate": ("evaluate",),
    "kvfold.files.read": ("load",),
    "kvfold.generate": ("generate",),
    "kvfold.method": ("Across", "Measured", "Method", "Stages", "parse"),
    "kvfold.methods.adakv": ("AdaKV",),
    "kvfold.methods.auto": ("Auto",),
    "kvfold.methods.cam": ("CaM",),
    "kvfold.methods.d2o": ("D2O",),
    "kvfold.methods.dbudgetkv": ("DBudgetKV",),
    "kvfold.methods.full": ("Full",),
    "kvfold.methods.h2o": ("H2O",),
    "kvfold.methods.kivi": ("KIVI",),
    "kvfold.methods.knorm": ("KNorm",),
    "kvfold.methods.kvzip": ("KVzip",),
    "kvfold.methods.local_window": ("LocalWindow",),
    "kvfold.methods.merge": ("Merge",),
    "kvfold.methods.minicache": ("MiniCache",),
    "kvfold.methods.pyramidinfer": ("PyramidInfer",),
    "kvfold.methods.pyramidkv": ("PyramidKV",),
    "kvfold.methods.random": ("Random",),
    "kvfold.methods.roco": ("RoCo",),
    "kvfold.methods.simlayerkv": ("SimLayerKV",),
    "kvfold.methods.snapkv": ("SnapKV",),
    "kvfold.methods.streaming_llm": ("StreamingLLM",),
    "kvfold.methods.think": ("ThinK",),
    "kvfold.methods.tova": ("TOVA",),
    "kvfold.observation": ("Needs", "Observation"),
    "kvfold.registry": ("list_methods", "methods", "register"),
    "kvfold.select.forced": ("Forced",),
    "kvfold.spans": ("span",),
    "kvfold.stats": ("Stats",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


# Hidden from type checkers, to which any name would then exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, imported now and bound here."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


class _Package(ModuleType):
    """A package whose functions stay visible beside submodules of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of `kvfold.generate` binds that module here, where the function belongs.
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
