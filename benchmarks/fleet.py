# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet that answers questions about long documents, with their caches kept or not.

    python benchmarks/fleet.py docs/results/fleet

Servers compute one thing at a time: a document's prefill, which needs its operations, or decoding
steps of all running answers, which need the bytes of the weights and of their contexts. Contexts
stay in a server's memory, the least recently used leaves first, and return from shared storage over
the server's link, or by another prefill. Files are there from the start: a document is read and
compressed when it is uploaded. Operations are counted on the model without weights, but
those of causal attention and of methods; machines, arrivals and popularity are assumptions, named
in `Assumed`. `runs.jsonl` holds fleets of equal size under several rates, `servers.jsonl` how many
servers a limit to the first token takes. What they have is not simulated again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simpy
import torch
import typer
from pydantic import BaseModel, ConfigDict
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.jobs.records import RecordFile

STEPS = 16  # decoding steps between two looks at the queue
PART, REQUEST = 2000, 32  # KVzip: tokens repeated at once, and those that ask for them, about
PROJECTIONS = 64  # zap: random projections of an entry's features


Method = Literal["", "kvzip", "zap"]


class Record(BaseModel):
    """Frozen fields."""

    model_config = ConfigDict(frozen=True)


class Shape(Record):
    """A model by the numbers of its configuration; one server has `gpus` of them, as one."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    gpus: int = 1

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens`, 16 bits a number."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * tokens

    @property
    def weights(self) -> int:
        """Bytes of the weights, 16 bits a number."""
        return 2 * int(sum(each.numel() for each in _without_weights(self).parameters()))

    def operations(self, tokens: int, context: float = 0) -> float:
        """Operations of a forward of `tokens` over a `context` of entries."""
        attended = tokens * context + tokens**2 / 2
        return tokens * _operations_per_token(self) + 4 * self.layers * self.hidden * attended

    def scoring(self, method: Method, tokens: int) -> float:
        """Operations by which a method scores the entries of `tokens`, once they are read."""
        if method == "kvzip":
            return sum(
                self._repeating(min(PART, tokens - at), tokens) for at in range(0, tokens, PART)
            )
        if method == "zap":
            size = self.hidden // self.heads
            features = 2 * size + 3
            each = 2 * features * PROJECTIONS + 2 * (features + PROJECTIONS)
            return self.layers * self.kv_heads * tokens * each
        return 0.0

    def _repeating(self, part: int, tokens: int) -> float:
        """Operations of a forward that repeats a part, and of its second softmax, by that part."""
        new = part + REQUEST
        logits = new * (part + new / 2)
        return self.operations(new, tokens) + 2 * self.layers * self.hidden * logits


@cache
def _without_weights(shape: Shape) -> Any:
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocabulary,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@cache
def _operations_per_token(shape: Shape) -> int:
    """Operations of one more token, but those of attention."""
    counts: list[int] = []
    for tokens in (1, 2):
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        mask = torch.zeros(1, 1, tokens, tokens, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            _without_weights(shape)(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        counts.append(counter.get_total_flops())
    attention = 4 * shape.layers * shape.hidden * 3  # of two tokens over two, less one over one
    return counts[1] - counts[0] - attention


class Deployment(Record):
    """Handling of a document's cache.

    Args:
        kept: part of the entries in memory; 0: nothing stays.
        stored: bytes on shared storage, as a part of the full cache's; None: nothing is stored.
        method: that chooses the entries; "": all are kept.
    """

    name: str
    kept: float
    stored: float | None = None
    method: Method = ""


class Assumed(Record):
    """Machines and load; times in seconds, sizes in bytes."""

    flops: float = 0.5 * 989e12  # of a GPU: half of what an H200 is sold with, in bfloat16
    bandwidth: float = 0.7 * 4.8e12
    memory: float = 0.9 * 141e9
    link: float = 5e9  # shared storage to a server
    servers: int = 8
    documents: int = 2000
    popularity: float = 1.0  # of the k-th document: 1 / k to this power
    tokens: int = 32768  # of a document
    question: int = 64
    answer: int = 256
    requests: int = 4000
    warm: int = 1000  # first requests, which are not counted
    seed: int = 0


class Run(Record):
    """Results at a rate: sources of contexts, in shares, and times to first tokens."""

    shape: Shape
    deployment: Deployment
    assumed: Assumed
    rate: float  # requests a second, of the whole fleet
    in_memory: float
    loaded: float
    prefilled: float
    median: float | None  # seconds; None: more have no answer
    slowest: float | None  # the 95th percentile
    busy: float  # part of the time that servers computed, up to the last request
    gpu_seconds: float  # of work for each first token, up to the last request
    compressing: float  # operations of reading and compressing a document, over those of reading it
    upload: float  # seconds of a server to read and compress a document
    contexts: float  # that fit into a server's memory
    finished: float  # part of the requests with a first token, in twice the time in which all came

    @property
    def key(self) -> tuple[Shape, Deployment, Assumed, float]:
        """The run's name."""
        return self.shape, self.deployment, self.assumed, self.rate


class Sized(Record):
    """The smallest fleet whose first tokens, 95 % of them, come `within` some seconds.

    `servers` is None if `MOST` servers do not.
    """

    shape: Shape
    deployment: Deployment
    assumed: Assumed  # but the number of servers
    rate: float
    within: float
    servers: int | None
    contexts: float  # that fit into a server's memory
    gpu_seconds: float | None  # of the whole fleet, for each request

    @property
    def key(self) -> tuple[Shape, Deployment, Assumed, float, float]:
        """The record's name."""
        return self.shape, self.deployment, self.assumed, self.rate, self.within


@dataclass(eq=False)
class Request:
    """A question about a document; `first` is the time of its first token."""

    document: int
    came: float
    source: str = ""
    first: float | None = None
    left: int = 0


@dataclass(eq=False)
class Server:
    """One server: contexts in memory by document, waiting prefills, and running answers."""

    env: simpy.Environment
    fleet: Fleet
    room: float
    held: OrderedDict[int, float] = field(default_factory=OrderedDict)
    coming: dict[int, simpy.Event] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    prefills: list[tuple[float, simpy.Event]] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    present: int = 0
    busy: float = 0.0

    def __post_init__(self) -> None:
        self.link = simpy.Resource(self.env)
        self.freed = self.env.event()
        self.work = self.env.event()
        self.env.process(self.compute())

    @property
    def used(self) -> float:
        """Bytes of contexts."""
        return sum(self.held.values())

    def compute(self) -> Generator[simpy.Event, Any, None]:
        """Prefills first, else steps of all running answers."""
        fleet = self.fleet
        while True:
            if self.prefills:
                seconds, done = self.prefills.pop(0)
                yield self.env.timeout(seconds)
                self.busy += seconds
                done.succeed()
            elif self.running:
                each = fleet.weights + fleet.context * len(self.running)
                steps = min(STEPS, *(request.left for request in self.running))
                seconds = steps * each / fleet.bandwidth
                yield self.env.timeout(seconds)
                self.busy += seconds
                for request in self.running:
                    request.left -= steps
                for request in [each for each in self.running if each.left <= 0]:
                    self.end(request)
            else:
                self.work = self.env.event()
                yield self.work

    def end(self, request: Request) -> None:
        """Lets a finished request go."""
        self.running.remove(request)
        self.present -= 1
        self.users[request.document] -= 1
        self.wake("freed")

    def wake(self, name: str) -> None:
        """Lets those that wait for an event go on."""
        event: simpy.Event = getattr(self, name)
        if not event.triggered:
            event.succeed()

    def prefill(self, seconds: float) -> simpy.Event:
        """Queues a forward; its event is its end."""
        done = self.env.event()
        self.prefills.append((seconds, done))
        self.wake("work")
        return done

    def answer(self, request: Request) -> Generator[simpy.Event, Any, None]:
        """Brings a request's context, reads its question, and lets it run."""
        document, fleet = request.document, self.fleet
        self.present += 1
        self.users[document] = self.users.get(document, 0) + 1
        if document in self.held:
            self.held.move_to_end(document)
            request.source = "memory"
        elif document in self.coming:
            request.source = "memory"
            yield self.coming[document]
        else:
            self.coming[document] = self.env.event()
            yield from self.make_room(fleet.context)
            self.held[document] = fleet.context
            if fleet.deployment.stored is not None:
                request.source = "storage"
                with self.link.request() as turn:
                    yield turn
                    yield self.env.timeout(fleet.file / fleet.assumed.link)
            else:
                request.source = "prefill"
                yield self.prefill(fleet.read + fleet.ask)
            self.coming.pop(document).succeed()
        if request.source != "prefill":
            yield self.prefill(fleet.ask)
        request.first = self.env.now
        request.left = fleet.assumed.answer
        self.running.append(request)
        self.wake("work")

    def make_room(self, size: float) -> Generator[simpy.Event, Any, None]:
        """Lets contexts go that nobody uses, the least recently used first, or waits."""
        while self.used + size > self.room:
            idle = [name for name in self.held if not self.users.get(name)]
            if idle:
                del self.held[idle[0]]
            else:
                if self.freed.triggered:
                    self.freed = self.env.event()
                yield self.freed


class Fleet:
    """Servers of one shape and deployment, and where requests go."""

    def __init__(self, shape: Shape, deployment: Deployment, assumed: Assumed) -> None:
        self.deployment, self.assumed = deployment, assumed
        self.env = simpy.Environment()
        full, flops = shape.bytes_of(assumed.tokens), assumed.flops * shape.gpus
        self.weights, self.bandwidth = shape.weights, assumed.bandwidth * shape.gpus
        self.context = (deployment.kept or 1.0) * full
        self.file = (deployment.stored or 0.0) * full
        reading = shape.operations(assumed.tokens)
        scoring = shape.scoring(deployment.method, assumed.tokens)
        self.compressing = 1 + scoring / reading
        self.read = (reading + scoring) / flops
        entries = (deployment.kept or 1.0) * assumed.tokens
        self.ask = shape.operations(assumed.question, entries) / flops
        self.busy = self.work = 0.0
        room = assumed.memory * shape.gpus - self.weights
        self.contexts = room // self.context
        self.servers = [Server(self.env, self, room) for _ in range(assumed.servers)]

    def server_for(self, document: int) -> Server:
        """The server that has the document, unless it is much busier than another."""
        least = min(self.servers, key=lambda each: each.present)
        having = [s for s in self.servers if document in s.held or document in s.coming]
        best = min(having, key=lambda each: each.present, default=least)
        return best if best.present <= least.present + STEPS else least

    def requests(self, rate: float) -> list[Request]:
        """All requests, in the order of their times."""
        assumed, draw = self.assumed, np.random.default_rng(self.assumed.seed)
        weights = 1 / np.arange(1, assumed.documents + 1) ** assumed.popularity
        documents = draw.choice(assumed.documents, assumed.requests, p=weights / weights.sum())
        times = draw.exponential(1 / rate, assumed.requests).cumsum()
        return [Request(int(d), float(t)) for d, t in zip(documents, times, strict=True)]

    def run(self, requests: list[Request]) -> None:
        """Simulates until all came, and as long again."""
        self.env.process(self._come(requests))
        last = requests[-1].came
        self.env.run(until=last)
        self.work = sum(server.busy for server in self.servers)
        self.busy = self.work / len(self.servers) / last
        self.env.run(until=2 * last)

    def _come(self, requests: list[Request]) -> Generator[simpy.Event]:
        for request in requests:
            yield self.env.timeout(request.came - self.env.now)
            server = self.server_for(request.document)
            if not self.deployment.kept:  # a document of its own for each request
                request.document = -1 - id(request)
            self.env.process(server.answer(request))


def simulate(shape: Shape, deployment: Deployment, assumed: Assumed, rate: float) -> Run:
    """One run."""
    fleet = Fleet(shape, deployment, assumed)
    requests = fleet.requests(rate)
    fleet.run(requests)
    counted = requests[assumed.warm :]
    waits = [r.first - r.came if r.first is not None else np.inf for r in counted]
    answered = sum(r.first is not None and r.first <= requests[-1].came for r in requests)
    shares = [float(np.mean([r.source == name for r in counted])) for name in SOURCES]
    return Run(
        shape=shape,
        deployment=deployment,
        assumed=assumed,
        rate=rate,
        in_memory=shares[0],
        loaded=shares[1],
        prefilled=shares[2],
        median=_quantile(waits, 0.5),
        slowest=_quantile(waits, 0.95),
        busy=fleet.busy,
        gpu_seconds=fleet.work * shape.gpus / max(1, answered),
        compressing=fleet.compressing,
        upload=fleet.read,
        contexts=fleet.contexts,
        finished=float(np.isfinite(waits).mean()),
    )


def sized(
    shape: Shape, deployment: Deployment, assumed: Assumed, rate: float, within: float
) -> Sized:
    """The smallest fleet, by doubling and bisection."""

    def suffices(servers: int) -> bool:
        fleet = assumed.model_copy(update={"servers": servers})
        slowest = simulate(shape, deployment, fleet, rate).slowest
        return slowest is not None and slowest <= within

    powers = (2**power for power in range(MOST.bit_length()))
    enough = next((servers for servers in powers if suffices(servers)), None)
    if enough is not None:
        enough = bisect_left(range(enough), True, enough // 2 + 1, key=suffices)
    return Sized(
        shape=shape,
        deployment=deployment,
        assumed=assumed,
        rate=rate,
        within=within,
        servers=enough,
        contexts=Fleet(shape, deployment, assumed).contexts,
        gpu_seconds=None if enough is None else enough * shape.gpus / rate,
    )


def _quantile(waits: list[float], part: float) -> float | None:
    found = float(np.quantile(waits, part, method="higher"))
    return found if np.isfinite(found) else None


SOURCES = ("memory", "storage", "prefill")
SHAPES = (
    Shape(
        name="Llama-3.1-8B",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        mlp=14336,
        vocabulary=128256,
    ),
    Shape(
        name="Qwen2.5-32B",
        hidden=5120,
        layers=64,
        heads=40,
        kv_heads=8,
        mlp=27648,
        vocabulary=152064,
    ),
    Shape(
        name="Llama-3.1-70B",
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        mlp=28672,
        vocabulary=128256,
        gpus=4,
    ),
)
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RATE, WITHIN, MOST = 4.0, 1.0, 64  # requests a second, seconds, servers of fleets that are sized
MEMORIES = (141e9, 80e9)  # bytes of a GPU, of which nine tenths are used


def deployments(coded: float) -> Iterator[Deployment]:
    """Full and compressed caches; `coded`: bytes of files of kvtc, as a part of their entries'."""
    yield Deployment(name="prefill each time", kept=0)
    yield Deployment(name="prefix cache", kept=1)
    yield Deployment(name="prefix cache, files", kept=1, stored=1)
    for kept in (0.5, 0.3, 0.2, 0.1):
        name = f"kvzip {kept:g}, files"
        yield Deployment(name=name, kept=kept, stored=kept, method="kvzip")
    name = "kvzip 0.3, kvtc files"
    yield Deployment(name=name, kept=0.3, stored=0.3 * coded, method="kvzip")
    yield Deployment(name="zap 0.2, files", kept=0.2, stored=0.2, method="zap")


def main(out: Path, coded: float = 0.27) -> None:
    """Simulates what the folder OUT lacks."""
    ways = list(deployments(coded))
    runs = RecordFile(out / "runs.jsonl", Run)
    known = {run.key for run in runs.load().records}
    for shape, way, rate in itertools.product(SHAPES, ways, RATES):
        if (shape, way, Assumed(), rate) not in known:
            run = simulate(shape, way, Assumed(), rate)
            runs.add([run])
            print(f"{shape.name:14} {way.name:22} {rate:4} /s: 95 % {run.slowest} s", flush=True)
    fleets = RecordFile(out / "servers.jsonl", Sized)
    there = {fleet.key for fleet in fleets.load().records}
    for memory, shape, way in itertools.product(MEMORIES, SHAPES, ways):
        assumed = Assumed(memory=0.9 * memory)
        if (shape, way, assumed, RATE, WITHIN) not in there:
            fleet = sized(shape, way, assumed, RATE, WITHIN)
            fleets.add([fleet])
            print(f"{shape.name:14} {way.name:22} {memory:.0e}: {fleet.servers}", flush=True)


if __name__ == "__main__":
    typer.run(main)
