# SPDX-License-Identifier: Apache-2.0
"""Public names and their modules: types for checkers, and the list that `__init__.py` reads."""

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

__version__: str
