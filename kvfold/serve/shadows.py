# SPDX-License-Identifier: Apache-2.0
"""Sampled answers, compared with a full cache's while the server has nothing else to do."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, Thread

import torch

from kvfold.evidence.sequential import SequentialTest
from kvfold.interruption import interrupt_by
from kvfold.serve.settings import LIMITS, ServerSettings
from kvfold.serve.shadow import Shadow, ShadowSkipped
from kvfold.serve.worker_threads import WorkerThreads

# Why a sampled request is not compared, as its metric says.
REASONS = (
    "uncompressed",  # it read no context
    "session",
    "empty",  # its answer has no tokens
    "unanswered",  # its client hung up in a forward, or it was refused while it was generated
    "waiting",  # too many wait already
    "busy",  # requests came each time that it was begun
    "moved",  # its context was deleted, moved to disk or shrunk
    "memory",  # a full cache does not fit beside the contexts
    "failed",  # by an error, whose kind the log names
)
SEED = 0
WAITING = 64  # answers that may wait
TRIES = 3
HIGHEST = 700.0  # logarithm of an e-value that is shown
PAUSE = 0.05  # seconds after which a busy server is looked at again
log = logging.getLogger(__name__)


class Shadows:
    """The share of answers that is compared, by `loss`, in a thread of its own.

    `test` asks whether the mean clipped loss is within the tolerance; the log says so, once, when
    it is not, and when memory first prevents a comparison. `skipped` counts by reason.
    """

    def __init__(
        self, settings: ServerSettings, workers: WorkerThreads, loss: Callable[[Shadow], float]
    ) -> None:
        self.share, self.tolerance = settings.shadow, settings.shadow_tolerance
        self.workers, self.loss = workers, loss
        self.skipped = dict.fromkeys(REASONS, 0)
        self.test = SequentialTest.of(self.tolerance / LIMITS.clip, LIMITS.error)
        self._draws = random.Random(SEED)
        self._waiting: deque[Shadow] = deque()
        self._changed = Condition()
        self._closing = False
        self._thread = Thread(target=self._run, name="kvfold shadows", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Answers that wait for the server to be idle."""
        return len(self._waiting)

    @property
    def mean_loss(self) -> float:
        """Mean clipped loss so far, in nats per token."""
        return LIMITS.clip * self.test.mean

    @property
    def e_value(self) -> float:
        """Wealth of the test: evidence against the certificate. Reached by chance, in all the time
        of a server, with a probability of at most its inverse."""
        return math.exp(min(self.test.log_wealth, HIGHEST))

    def sampled(self) -> bool:
        """True if the request that arrives is to be compared; drawn for each, in their order."""
        with self._changed:
            return self._draws.random() < self.share

    def add(self, shadow: Shadow | None) -> None:
        """Compares an answer later, unless a full cache gave it (None) or too many wait."""
        with self._changed:
            if shadow is None:
                self.skipped["uncompressed"] += 1
            elif not shadow.answer:
                self.skipped["empty"] += 1
            elif len(self._waiting) >= WAITING:
                self.skipped["waiting"] += 1
            else:
                self._waiting.append(shadow)
                self._changed.notify_all()

    def skip(self, reason: str) -> None:
        """Counts a sampled request that is not compared, for one of `REASONS`."""
        with self._changed:
            self.skipped[reason] += 1
            if reason == "memory" and self.skipped[reason] == 1:
                log.warning(
                    "an answer was not compared: a full cache did not fit beside the contexts, and "
                    "while it does not, nobody watches the certificate: give the server more memory"
                )

    def close(self) -> None:
        """Gives up what is being compared, and drops what waits."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        interrupt_by(self._check_idle)
        while (shadow := self._next()) is not None:
            self._compare(shadow)

    def _next(self) -> Shadow | None:
        """The next answer, once the server is idle; None at the end."""
        with self._changed:
            while not self._closing:
                if self._waiting and self.workers.idle:
                    return self._waiting.popleft()
                self._changed.wait(PAUSE if self._waiting else None)
            return None

    def _compare(self, shadow: Shadow) -> None:
        """Compares one answer, or puts it back when a request comes."""
        try:
            loss = self.loss(shadow)
        except _RequestCame:
            self._put_back(shadow)
        except ShadowSkipped as skipped:
            self.skip(skipped.reason)
        except torch.OutOfMemoryError:
            self.skip("memory")
        except Exception as problem:
            # Only its kind: nothing of a text gets into the log.
            log.error("an answer could not be compared: %s", type(problem).__name__)
            self.skip("failed")
        else:
            self._count(LIMITS.clip if math.isnan(loss) else loss)  # predictions are no numbers

    def _put_back(self, shadow: Shadow) -> None:
        with self._changed:
            if shadow.given_up + 1 == TRIES:
                self.skipped["busy"] += 1
            else:
                self._waiting.append(replace(shadow, given_up=shadow.given_up + 1))

    def _count(self, loss: float) -> None:
        before, self.test = self.test, self.test.after(min(1.0, loss / LIMITS.clip))
        if self.test.rejected and not before.rejected:
            log.warning(
                "the certificate no longer holds: over %d answers the mean loss is %.3g nats per "
                "token, and above the tolerance of %g, at an error of %g",
                self.test.samples,
                self.mean_loss,
                self.tolerance,
                LIMITS.error,
            )

    def _check_idle(self) -> None:
        if self._closing or not self.workers.idle:
            raise _RequestCame


@contextmanager
def answering(shadows: Shadows | None) -> Iterator[None]:
    """Context of a sampled answer's generation: one that ends by an error is counted."""
    try:
        yield
    except BaseException:
        if shadows is not None:
            shadows.skip("unanswered")
        raise


class _RequestCame(Exception):
    """Ends a comparison."""
