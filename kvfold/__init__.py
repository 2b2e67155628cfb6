# SPDX-License-Identifier: Apache-2.0
"""kvfold: a KV cache that stays small. The names here are the public ones.

Each is imported when it is first asked for, so that `import kvfold` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.budget import Budget as Budget
    from kvfold.bundled import bundled_model as bundled_model
    from kvfold.cache.cache import CompressedCache as CompressedCache
    from kvfold.cache.spans import span as span
    from kvfold.cache.stats import Stats as Stats
    from kvfold.contexts.context import Context as Context
    from kvfold.contexts.context import compress as compress
    from kvfold.contexts.files.read import load as load
    from kvfold.errors import BudgetError as BudgetError
    from kvfold.errors import ContextFileError as ContextFileError
    from kvfold.errors import IllegalComposition as IllegalComposition
    from kvfold.errors import KvfoldError as KvfoldError
    from kvfold.errors import UnsupportedModel as UnsupportedModel
    from kvfold.eval.evaluate import evaluate as evaluate
    from kvfold.generation.generate import generate as generate
    from kvfold.hf.attention import disable as disable
    from kvfold.hf.attention import enable as enable
    from kvfold.methods.adakv import AdaKV as AdaKV
    from kvfold.methods.auto import Auto as Auto
    from kvfold.methods.base import Across as Across
    from kvfold.methods.base import Measured as Measured
    from kvfold.methods.base import Method as Method
    from kvfold.methods.base import Stages as Stages
    from kvfold.methods.base import parse as parse
    from kvfold.methods.cam import CaM as CaM
    from kvfold.methods.chunkkv import ChunkKV as ChunkKV
    from kvfold.methods.cur import CUR as CUR
    from kvfold.methods.d2o import D2O as D2O
    from kvfold.methods.dbudgetkv import DBudgetKV as DBudgetKV
    from kvfold.methods.dropkv import DropKV as DropKV
    from kvfold.methods.full import Full as Full
    from kvfold.methods.h2o import H2O as H2O
    from kvfold.methods.keydiff import KeyDiff as KeyDiff
    from kvfold.methods.kivi import KIVI as KIVI
    from kvfold.methods.knorm import KNorm as KNorm
    from kvfold.methods.kvzip import KVzip as KVzip
    from kvfold.methods.local_window import LocalWindow as LocalWindow
    from kvfold.methods.merge import Merge as Merge
    from kvfold.methods.minicache import MiniCache as MiniCache
    from kvfold.methods.observation import Needs as Needs
    from kvfold.methods.observation import Observation as Observation
    from kvfold.methods.pyramidinfer import PyramidInfer as PyramidInfer
    from kvfold.methods.pyramidkv import PyramidKV as PyramidKV
    from kvfold.methods.random import Random as Random
    from kvfold.methods.registry import list_methods as list_methods
    from kvfold.methods.registry import register as register
    from kvfold.methods.roco import RoCo as RoCo
    from kvfold.methods.simlayerkv import SimLayerKV as SimLayerKV
    from kvfold.methods.snapkv import SnapKV as SnapKV
    from kvfold.methods.stages.select.forced import Forced as Forced
    from kvfold.methods.streaming_llm import StreamingLLM as StreamingLLM
    from kvfold.methods.think import ThinK as ThinK
    from kvfold.methods.tova import TOVA as TOVA

__version__ = "0.1.0"

# Public names by the module that defines them; the imports above say the same to type checkers.
_NAMES = {
    "kvfold.budget": ("Budget",),
    "kvfold.bundled": ("bundled_model",),
    "kvfold.cache.cache": ("CompressedCache",),
    "kvfold.hf.attention": ("disable", "enable"),
    "kvfold.contexts.context": ("Context", "compress"),
    "kvfold.errors": (
        "BudgetError",
        "ContextFileError",
        "IllegalComposition",
        "KvfoldError",
        "UnsupportedModel",
    ),
    "kvfold.eval.evaluate": ("evaluate",),
    "kvfold.contexts.files.read": ("load",),
    "kvfold.generation.generate": ("generate",),
    "kvfold.methods.base": ("Across", "Measured", "Method", "Stages", "parse"),
    "kvfold.methods.adakv": ("AdaKV",),
    "kvfold.methods.auto": ("Auto",),
    "kvfold.methods.cam": ("CaM",),
    "kvfold.methods.chunkkv": ("ChunkKV",),
    "kvfold.methods.cur": ("CUR",),
    "kvfold.methods.d2o": ("D2O",),
    "kvfold.methods.dbudgetkv": ("DBudgetKV",),
    "kvfold.methods.dropkv": ("DropKV",),
    "kvfold.methods.full": ("Full",),
    "kvfold.methods.h2o": ("H2O",),
    "kvfold.methods.keydiff": ("KeyDiff",),
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
    "kvfold.methods.observation": ("Needs", "Observation"),
    "kvfold.methods.registry": ("list_methods", "register"),
    "kvfold.methods.stages.select.forced": ("Forced",),
    "kvfold.cache.spans": ("span",),
    "kvfold.cache.stats": ("Stats",),
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
