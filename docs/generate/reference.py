# SPDX-License-Identifier: Apache-2.0
"""Pages of the reference: public names by group, and the stages by module, for mkdocstrings."""

from __future__ import annotations

from pkgutil import walk_packages

import kvfold
from docs.generate import method_pages
from kvfold import store
from kvfold.methods import stages

# Public names by page; those of methods have pages of their own
GROUPS = {
    "Cache and generation": (
        "CompressedCache", "generate", "Budget", "Stats", "span", "enable", "disable",
        "bundled_model", "image_spans",
    ),
    "Contexts": ("compress", "load", "join", "Context", "pipeline"),
    "Sessions": ("begin_session", "load_session", "Session", "Message"),
    "Methods": (
        "list_methods", "parse", "register", "Method", "Stages", "AtEnd", "Once", "Hold", "Rounds",
        "Observation", "Forced", "Measured", "Across",
        "fit_scorer", "FitResult", "fit_filters", "FilterFit", "fit_centres", "CentreFit",
        "fit_heads", "HeadFit", "fit_curve", "CurveFit", "fit_codec", "CodecFit",
    ),
    "Observations": (
        "Needs", "Need", "Observer", "LastQueries", "ColumnSums", "ColumnSquares", "TokenIds",
        "KeysBeforeRope", "OutputNorms", "PreviousScores", "QueryMomentsNeed", "ChunkSumsNeed",
        "SurpriseNeed", "PromptTokens",
    ),
    "Policies": (
        "policies.policy", "policies.Policy", "policies.PolicyNeeds", "policies.Prefill",
        "policies.Rope", "policies.Kept", "policies.split_heads", "policies.sharing_loss",
        "policies.SharingLoss", "policies.lmcache.LMCacheEdit",
    ),
    "Evaluation": ("evaluate", "check", "CheckResult"),
    "Errors": (
        "KvfoldError", "BudgetError", "ContextFileError", "ScorerFileError", "IllegalComposition",
        "UnsupportedModel",
    ),
}  # fmt: skip
ENCODINGS = ("quantized", "pruned", "paired", "encoding")


def pages() -> dict[str, str]:
    """Pages by their titles."""
    own = {cls.__name__ for cls in method_pages.classes().values()}
    left = (
        set(vars(kvfold)["__all__"]) - own - {name for names in GROUPS.values() for name in names}
    )
    if left:
        raise ValueError(f"public names without a group in {__file__}: {', '.join(sorted(left))}")
    made = {title: _page(title, [f"kvfold.{n}" for n in names]) for title, names in GROUPS.items()}
    modules = [m.name for m in walk_packages(stages.__path__, f"{stages.__name__}.") if not m.ispkg]
    made["Stages"] = _page("Stages", modules)
    made["Encodings"] = _page("Encodings", [f"{store.__name__}.{name}" for name in ENCODINGS])
    return made


def _page(title: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)]) + "\n"
