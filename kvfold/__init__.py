# SPDX-License-Identifier: Apache-2.0
"""kvfold: a KV cache that stays small. The names here are the public ones."""

from kvfold.budget import Budget
from kvfold.bundled import bundled_model
from kvfold.cache import CompressedCache
from kvfold.compat import disable, enable
from kvfold.context import Context, compress
from kvfold.errors import (
    BudgetError,
    ContextFileError,
    IllegalComposition,
    KvfoldError,
    UnsupportedModel,
)
from kvfold.files.read import load
from kvfold.generate import generate
from kvfold.method import Method, methods, parse
from kvfold.methods.adakv import AdaKV
from kvfold.methods.auto import Auto
from kvfold.methods.cam import CaM
from kvfold.methods.d2o import D2O
from kvfold.methods.dbudgetkv import DBudgetKV
from kvfold.methods.full import Full
from kvfold.methods.h2o import H2O
from kvfold.methods.kivi import KIVI
from kvfold.methods.knorm import KNorm
from kvfold.methods.kvzip import KVzip
from kvfold.methods.local_window import LocalWindow
from kvfold.methods.merge import Merge
from kvfold.methods.minicache import MiniCache
from kvfold.methods.pyramidinfer import PyramidInfer
from kvfold.methods.pyramidkv import PyramidKV
from kvfold.methods.random import Random
from kvfold.methods.roco import RoCo
from kvfold.methods.simlayerkv import SimLayerKV
from kvfold.methods.snapkv import SnapKV
from kvfold.methods.streaming_llm import StreamingLLM
from kvfold.methods.think import ThinK
from kvfold.methods.tova import TOVA
from kvfold.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "D2O",
    "H2O",
    "KIVI",
    "TOVA",
    "AdaKV",
    "Auto",
    "Budget",
    "BudgetError",
    "CaM",
    "CompressedCache",
    "Context",
    "ContextFileError",
    "DBudgetKV",
    "Full",
    "IllegalComposition",
    "KNorm",
    "KVzip",
    "KvfoldError",
    "LocalWindow",
    "Merge",
    "Method",
    "MiniCache",
    "PyramidInfer",
    "PyramidKV",
    "Random",
    "RoCo",
    "SimLayerKV",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "ThinK",
    "UnsupportedModel",
    "bundled_model",
    "compress",
    "disable",
    "enable",
    "generate",
    "load",
    "methods",
    "parse",
]
