# SPDX-License-Identifier: Apache-2.0
"""Measurements of single prompts, stored as they come so that a stopped check goes on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, model_validator

from kvfold.checks.reading import MethodAtBudget
from kvfold.eval.run.read_files import digests
from kvfold.evidence.records import RecordFile
from kvfold.writing import make_folder

RECORDS = "check.jsonl"
FULL = "full"
KINDS = "forced", "distances", "answer", "leaked"


class PromptDistances(BaseModel, frozen=True):
    """Distance to the full cache at each forced position of a prompt, and the entries kept.

    `spans` are the shares of the spans' entries that are stored.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    lost: tuple[float, ...]
    kept: float = 1.0
    nbytes: int = 0
    nbytes_full: int = 0
    spans: dict[str, float] = {}


class FreeAnswer(BaseModel, frozen=True):
    """Length in tokens of a greedy answer; `ended` if it came to an end before the limit."""

    tokens: int
    ended: bool


class CheckRecord(BaseModel, frozen=True, extra="forbid"):
    """One line of the records file: what was measured of a prompt in one cache.

    `run` is the digest of model and protocol, `prompt` that of the prompt, `files` those of what
    the method reads, such as a fitted scorer. Of the full cache:
    `forced` are the tokens of its answer, `distances` those of another chunking (the noise floor),
    `effects` the mean KL to the same prompt without each span. `leaked` is the ROUGE-L recall of
    each protected text in the answers to attacks.
    """

    run: str
    prompt: str
    method: str
    budget: str | None
    files: tuple[str, ...] = ()
    forced: tuple[int, ...] | None = None
    distances: PromptDistances | None = None
    effects: dict[str, float] | None = None
    answer: FreeAnswer | None = None
    leaked: dict[str, float] | None = None

    @property
    def kind(self) -> str | None:
        """The field that holds the measurement; None for a record without one."""
        return next((name for name in KINDS if getattr(self, name) is not None), None)

    @model_validator(mode="after")
    def _measured(self) -> CheckRecord:
        if self.kind is None:
            raise ValueError("it holds no measurement")
        return self


class _Key(NamedTuple):
    prompt: str
    method: str
    budget: str | None
    files: tuple[str, ...]
    kind: str


class CheckStore:
    """Records of one run, in memory and, with a folder, in its file.

    Raises KvfoldError for a folder that cannot be made, or whose file is another program's.
    """

    def __init__(self, run: str, folder: Path | None) -> None:
        self.run = run
        if folder is not None:
            make_folder(folder)
        self.file = None if folder is None else RecordFile(folder / RECORDS, CheckRecord)
        loaded = self.file.load().records if self.file is not None else []
        self._found = {_key(record): record for record in loaded if record.run == run}

    def get(self, prompt: str, cell: MethodAtBudget, kind: str) -> CheckRecord | None:
        """The record that holds the field `kind` of a prompt in one cache."""
        return self._found.get(_Key(prompt, *cell, digests(cell[0]), kind))

    def add(self, record: CheckRecord) -> CheckRecord:
        """Stores a record, durably where there is a folder."""
        self._found[_key(record)] = record
        if self.file is not None:
            self.file.add([record])
        return record


def _key(record: CheckRecord) -> _Key:
    assert record.kind is not None
    return _Key(record.prompt, record.method, record.budget, record.files, record.kind)
