# SPDX-License-Identifier: Apache-2.0
"""Terminal tables of `kvfold inspect`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvfold.cache.stats import OVER_BUDGET
from kvfold.evidence.tables import size, table
from kvfold.inspect.attention_maps import MOST, SINKS, THRESHOLDS, LayerAttention, lazy_window
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.retention import Retention

EXPLAINED = (
    "Means over heads. Per query: the entries that one query attends to, exp of its entropy. "
    "Hold: the entries that received so much of all attention. Variance: of the column sums, as "
    "D2O has it. Lazy: the last query's attention to the first {sinks} and the last {window} "
    "tokens, as SimLayerKV has it. Keep: the sinks and newest entries that leave its norm within "
    "1 %, as DBudgetKV has it."
)


def layers_table(layers: Sequence[LayerAttention]) -> Table:
    """A row per layer: the statistics that methods allocate by."""
    numbers = ("per query", f"hold {MOST:.0%}", "variance", "lazy", "keep 1 %")
    shown = table(f"attention of {len(layers)} layers", "layer", *numbers, right=numbers)
    percent = THRESHOLDS.index(min(THRESHOLDS, key=lambda t: abs(t - 0.01)))
    for layer in layers:
        shown.add_row(
            str(layer.index),
            f"{float(layer.entropy.exp().mean()):,.1f}",
            f"{float(layer.holders.float().mean()):,.0f}",
            f"{float(layer.variance.mean()):.3g}",
            f"{layer.lazy:.0%}",
            f"{int(layer.kept[percent]):,}",
        )
    return shown


def explained(layers: Sequence[LayerAttention]) -> str:
    """Legend of the columns of `layers_table`."""
    return EXPLAINED.format(sinks=SINKS, window=lazy_window(len(layers[0].edges)))


def methods_table(document: InspectedText, retentions: Sequence[Retention]) -> Table:
    """A row per method: fraction kept, bytes, and the fraction of needle tokens kept, if any."""
    asked = [needle for needle in document.needles if needle.asked]
    numbers = ("kept", *(("of needles", "of the one asked") if asked else ()), "bytes", "of full")
    shown = table("what each method keeps", "method", *numbers, right=numbers)
    if any(retention.forced_over_budget for retention in retentions):
        shown.caption = f"*: {OVER_BUDGET}"
    for retention in retentions:
        found = (retention.kept_of(document.needles), retention.kept_of(asked)) if asked else ()
        shown.add_row(
            retention.method,
            f"{retention.kept:.1%}{'*' * retention.forced_over_budget}",
            *(f"{share:.0%}" for share in found),
            size(retention.nbytes),
            f"{retention.nbytes / retention.nbytes_full:.1%}",
        )
    return shown
