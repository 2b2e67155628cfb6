# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench --throughput`: tokens per second at the largest batch under a memory cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median, median_low

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import FULL
from kvfold.bench.record import check_setup
from kvfold.bench.session import BenchSession
from kvfold.bench.table import rate, spread
from kvfold.bench.throughput import (
    ThroughputCell,
    ThroughputRecord,
    ThroughputRunner,
    sizes,
    throughput_labels,
)
from kvfold.budget import Budget
from kvfold.cli.console import progress
from kvfold.cli.records import loaded
from kvfold.evidence.estimates import Quartiles
from kvfold.evidence.records import RecordFile
from kvfold.evidence.tables import size, table
from kvfold.terminal import print_json


def measure_throughput(
    screen: Console,
    subject: BenchModel,
    methods: Sequence[str],
    settings: Sequence[str],
    cap: str,
    repeats: int,
    out: Path,
    as_json: bool,
) -> None:
    """Runs the rounds that the file does not hold yet, and prints tables, or records as JSON."""
    most = int(Budget.bytes(cap).amount)
    pairs = [sizes(setting) for setting in settings]
    source = subject.source.model_dump()
    loads = [ThroughputCell(**source, prompt=p, generated=g, cap=most) for p, g in pairs]
    store = RecordFile(out, ThroughputRecord)
    session = BenchSession.of(subject, {})
    records = loaded(screen, store)
    check_setup(records, session.setups, out)
    with progress(screen) as bar:
        task = bar.add_task("starting", total=None)
        for load in loads:
            before = [record for record in records if record.load == load]
            done = Counter(record.label for record in before)
            known = {record.label: record.outcome.batch for record in before}
            wanted = throughput_labels(methods, load.prompt)
            missing = {label: repeats - done[label] for label in wanted if done[label] < repeats}
            runner = ThroughputRunner(
                session, load, lambda text: bar.update(task, description=text)
            )
            for record in runner.rounds(missing, known):
                store.add([record])
    records = store.load().records
    if as_json:
        print_json([each.model_dump(mode="json") for each in records if each.load in loads])
    for load in () if as_json else loads:
        screen.print(_table(load, [each for each in records if each.load == load]))
    screen.print(Text(f"records: {out.resolve()}"))


def _table(load: ThroughputCell, records: Sequence[ThroughputRecord]) -> Table:
    numbers = ("batch", "cache", "tokens/s", "x full", "prefill", "decode")
    shown = table(
        f"{load}, weights and cache in {size(load.cap)}", "method", *numbers, right=numbers
    )
    shown.caption = (
        "tokens/s: generated ones, over prefill and decode; x full: within a round; medians"
    )
    full = {(r.session, r.round): r for r in records if r.method == FULL}
    names = dict.fromkeys(record.label for record in records)
    for label in sorted(names, key=lambda label: label.method != FULL):
        own = [record for record in records if record.label == label]
        outcomes = [record.outcome for record in own]
        pairs = [(r, full[r.session, r.round]) for r in own if (r.session, r.round) in full]
        ratios = [r.outcome.tokens_per_second / f.outcome.tokens_per_second for r, f in pairs]
        shown.add_row(
            str(label),
            f"{median_low(o.batch for o in outcomes)}",
            size(median_low(o.cache_bytes for o in outcomes)),
            rate(median(o.tokens_per_second for o in outcomes)),
            spread(Quartiles.of(ratios)),
            f"{median(o.prefill_seconds for o in outcomes):.3g} s",
            f"{median(o.decode_seconds for o in outcomes):.3g} s",
        )
    return shown
