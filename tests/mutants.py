# SPDX-License-Identifier: Apache-2.0
"""The first test that fails on each of some mutants of the core.

    python -m tests.mutants mutants.jsonl --count 200  # goes on where it was stopped

Tests are collected once. Each mutant is a fork: functions of its file get the changed code, and
tests run until one fails. First come those that killed another of the file, then its own tests.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.mutants import Mutant, mutants_of, put_in
from tests.test_addresses import TESTED_BY

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("cache", "store", "methods")
TESTS = (*MUTATED, "observers", "attention", "generation", "contexts", "properties")
# Seconds of CPU: after which no test of a mutant begins, and until which the last has to end.
LIMIT, HANGS = 30, 90


@cache
def of_core() -> list[Mutant]:
    """All mutants of the core."""
    paths = (path for name in MUTATED for path in sorted((ROOT / "kvfold" / name).rglob("*.py")))
    found = (mutants_of(path.read_text(), str(path.relative_to(ROOT))) for path in paths)
    return [mutant for each in found for mutant in each]


def chosen(count: int, seed: int = 0) -> list[Mutant]:
    """`count` mutants of the core, drawn by a seed."""
    return random.Random(seed).sample(of_core(), count)


class Killing:
    """A plugin of pytest that runs the collected tests on each mutant, instead of once."""

    def __init__(self, mutants: Sequence[Mutant], records: Path) -> None:
        self.mutants, self.records = mutants, records
        self.failed, self.killers = "", set[tuple[str, str]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        layers = list[pytest.Item](), list[pytest.Item]()
        for item in session.items:
            layers[item.get_closest_marker("whole") is not None].append(item)
        for mutant in self.mutants:
            killed = self.first_failure(mutant, layers[0])
            by_all = killed or self.first_failure(mutant, layers[1])
            with self.records.open("a") as file:
                file.write(json.dumps(asdict(mutant) | {"test": killed, "test-all": by_all}) + "\n")
        return True

    def first_failure(self, mutant: Mutant, items: Sequence[pytest.Item]) -> str:
        """The test that fails on a mutant, "no end" if one hangs or crashes, "" if none fails."""
        here, there = os.pipe()
        if not (child := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (HANGS + int(time.process_time()),) * 2)
            importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
            put_in(mutant.source((ROOT / mutant.file).read_text()), str(ROOT / mutant.file))
            self.run(self.ordered(mutant, items))
            os.write(there, self.failed.encode())
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as said:
            failed = said.read()
        if os.waitpid(child, 0)[1]:
            return "no end"
        self.killers.add((mutant.file, failed))
        return failed

    def ordered(self, mutant: Mutant, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Tests in the order in which they run on a mutant."""
        place = Path(mutant.file).relative_to("kvfold")
        own = TESTED_BY.get(str(place), str(place.with_name(f"test_{place.name}")))

        def rank(item: pytest.Item) -> tuple[bool, ...]:
            killed = (mutant.file, item.nodeid) in self.killers
            near = item.nodeid.startswith(f"tests/{place.parts[0]}/")
            slow = item.get_closest_marker("slow") is not None
            return not killed, not item.nodeid.startswith(f"tests/{own}"), not near, slow

        return sorted(random.Random(mutant.line).sample(items, len(items)), key=rank)

    def run(self, items: Sequence[pytest.Item]) -> None:
        """Runs tests until one fails or the time is over."""
        end = time.process_time() + LIMIT
        for item, following in pairwise([*items, None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed or time.process_time() > end:
                return


def main() -> None:
    """Runs the mutants that have no record yet, and prints how many were killed by what."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("records", type=Path)
    arguments.add_argument("--count", type=int, default=200)
    given = arguments.parse_args()
    given.records.touch()
    records = [json.loads(line) for line in given.records.read_text().splitlines()]
    known = [{name: record[name] for name in Mutant.__annotations__} for record in records]
    left = [each for each in chosen(given.count) if asdict(each) not in known]
    folders = [str(ROOT / "tests" / name) for name in TESTS]
    pytest.main(["-p", "no:cacheprovider", *folders], plugins=[Killing(left, given.records)])
    found = [json.loads(line) for line in given.records.read_text().splitlines()]
    killed = [sum(bool(each[name]) for each in found) for name in ("test", "test-all")]
    print(f"of {len(found)} mutants, make test kills {killed[0]}, make test-all {killed[1]}")


if __name__ == "__main__":
    main()
