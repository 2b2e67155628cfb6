# SPDX-License-Identifier: Apache-2.0
"""Packed, pruned and paired caches against the papers' formulas, number by number."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvfold
from kvfold.generation.reading import read_turn
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.views import Encoded, PartView, RaggedView
from tests.helpers import truth as masked_dense
from tests.helpers.budgets import compressed
from tests.helpers.caches import counted_bytes, positions, reachable_bytes, same
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

ALONE, PADDED = (75,), (75, 53, 11)
BUDGET = 40
SIZE = 16  # of a head: one group of two bits
LOT = 32  # while decoding, so many values are packed at a time
KIVI = "kivi:group=8,residual=16"
KIVI2 = "kivi:bits=2,group=16,residual=32"
TURBO, TURBO3 = "turboquant:residual=8", "turboquant:keys=3,values=2,residual=3,end_layers=1"
FP8 = "turboquant:keys=8,values=3,residual=0,sinks=0,end_layers=0"
THINK, MINICACHE = "think:queries=8,recent=8", "minicache:block=8"
LATE_THINK = "think:ratio=0.7,queries=5,recent=20"  # a short row's channels go a turn later
METHODS = [
    KIVI,
    KIVI2,
    "kivi:bits=8,group=8,residual=8",
    "kivi:key_bits=2,value_bits=8,group=16,residual=16",
    TURBO,
    TURBO3,
    FP8,
    THINK,
    LATE_THINK,
    MINICACHE,
    "minicache:block=20,gamma=0.2,t=0.3,start=0",
    f"snapkv:window=8 + {KIVI}",
    f"adakv:window=8 + {KIVI2}",
    "snapkv:window=12 + think:queries=5,recent=8",
    f"kvzip:chunk=50 + {KIVI}",
    f"snapkv:window=8 + {TURBO}",
    f"adakv:window=8 + {TURBO},correct=false",
    f"kvzip:chunk=50 + {TURBO}",
    f"streaming_llm_original:decode=append + {MINICACHE}",
]
EVERY = pytest.mark.parametrize("spec", METHODS)
EACH = pytest.mark.parametrize("spec", [KIVI, f"adakv:window=8 + {KIVI}", TURBO, THINK, MINICACHE])


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64, head_dim=SIZE)


@pytest.fixture(scope="module")
def second():
    return build("llama", torch.float64, head_dim=SIZE)


# --- the truth: everything is stored, and overwritten when it is due ---------------------------


class Overwriting(MaskedDense):
    """Changes what is stored as `encode` says, after the prompt, each step, and each turn."""

    def __init__(self, model: Any, encode: Encoding, mask: Tensor | None) -> None:
        super().__init__(model, mask)
        model.set_attn_implementation(NAME)
        self.encode = encode

    def after(self, cache: kvfold.CompressedCache, decoding: bool) -> None:
        """Brings the store to where `cache`, which says what was evicted, is now."""
        self.hide(cache)
        layers = [self.cache.layers[i] for i in self.own]
        stored = [cache.positions(layer) for layer in range(len(layers))]
        for row in range(len(stored[0])):
            for head in range(len(stored[0][row])):
                at = [of_layer[row][head].tolist() for of_layer in stored]
                # Views: what is written to them is stored.
                keys = [layer.keys[row, head] for layer in layers]
                values = [layer.values[row, head] for layer in layers]
                queries = [_queries[i][row].unflatten(0, (2, -1))[head] for i in self.own]
                real = None if self.mask is None else self.mask[row, -queries[0].shape[1] :].bool()
                queries = [q if real is None else q[:, real] for q in queries]
                self.encode((row, head), at, keys, values, queries, decoding)


NAME = "masked_dense_watched"
_queries: dict[int, Tensor] = {}


def _watched(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    _queries[module.layer_idx] = query
    return masked_dense.attention(module, query, *args, **kwargs)


AttentionInterface.register(NAME, _watched)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])

# (segment, each layer's columns, keys [N, D], values [N, D], queries [G, S, D], decoding)
Encoding = Callable[
    [tuple[int, int], list[list[int]], list[Tensor], list[Tensor], list[Tensor], bool], None
]


def exact(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def restored(numbers: list[float], bits: int) -> list[float]:
    """A group of numbers as `bits` bits each hold them."""
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1)
    return [low + step * (round((x - low) / step) if step else 0) for x in numbers]


class Kivi:
    """Keys in groups along the tokens, values along the channels."""

    def __init__(self, key_bits: int, value_bits: int, group: int, residual: int) -> None:
        self.bits, self.group, self.residual = (key_bits, value_bits), group, residual
        self.done: dict[Any, tuple[int, int]] = {}

    def __call__(self, segment, columns, keys, values, queries, decoding) -> None:
        for layer, at in enumerate(columns):
            old = self.done.get((layer, segment), (0, 0))
            n = len(at)
            new = max(old[0], n - n % self.residual), max(old[1], n - self.residual)
            if decoding:
                new = new[0], old[1] + (new[1] - old[1]) // LOT * LOT
            self.done[layer, segment] = new
            for start in range(old[0], new[0], self.group):
                group = at[start : start + self.group]
                channels = zip(*keys[layer][group].tolist(), strict=True)
                packed = [restored(list(numbers), self.bits[0]) for numbers in channels]
                for i, *numbers in zip(group, *packed, strict=True):
                    keys[layer][i] = exact(numbers)
            for i in at[old[1] : new[1]]:
                for start in range(0, SIZE, self.group):
                    channels = slice(start, start + self.group)
                    numbers = values[layer][i, channels].tolist()
                    values[layer][i, channels] = exact(restored(numbers, self.bits[1]))


# Upper half of the Lloyd–Max centroids of a unit Gaussian, by Lloyd's iteration in 40 digits.
CENTROIDS = {
    2: [0.4527800346365, 1.5104176084991],
    3: [0.2450941789442, 0.7560052812059, 1.3439092785050, 2.1519457045370],
    4: [0.1283950298511, 0.3880482994903, 0.6567591185325, 0.9423404564870,
        1.2562311973472, 1.6180463860219, 2.0690172265314, 2.7325895709952],
}  # fmt: skip


def half(number: float) -> float:
    return torch.tensor(number).half().item()


def turned(numbers: list[float]) -> list[float]:
    """Numbers by the orthonormal Hadamard matrix, which is its own inverse."""
    if len(numbers) == 1:
        return numbers
    middle = len(numbers) // 2
    one, other = turned(numbers[:middle]), turned(numbers[middle:])
    pairs = list(zip(one, other, strict=True))
    return [(a + b) / 2**0.5 for a, b in pairs] + [(a - b) / 2**0.5 for a, b in pairs]


def in_float8(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).to(torch.float8_e4m3fn).item()


class Turboquant:
    """Each entry by itself: keys by length and direction, values by scale and minimum."""

    def __init__(self, method: kvfold.TurboQuant, layers: range) -> None:
        self.method, self.layers = method, layers
        self.done: dict[Any, set[int]] = {}

    def __call__(self, segment, columns, keys, values, queries, decoding) -> None:
        for layer in self.layers:
            at, done = columns[layer], self.done.setdefault((layer, segment), set())
            old = len(done & set(at))
            count = len(at) - self.method.residual
            if decoding:
                count = old + (count - old) // LOT * LOT
            if count <= max(old, self.method.sinks):
                continue
            for place, i in enumerate(at[:count]):
                if i not in done and (old or place >= self.method.sinks):
                    keys[layer][i] = exact(self.key(keys[layer][i].tolist()))
                    values[layer][i] = exact(self.value(values[layer][i].tolist()))
            done.update(at[:count])

    def key(self, key: list[float]) -> list[float]:
        if self.method.keys == 8:
            scale = half(max(map(abs, key)) / 448)
            return [in_float8(min(max(x / scale, -448.0), 448.0)) * scale for x in key]
        length, unit = math.hypot(*key), len(key) ** 0.5
        table = CENTROIDS[self.method.keys]
        table = [*(-x for x in reversed(table)), *table]
        levels = [min(table, key=lambda c, x=x: abs(c - x / length * unit)) for x in turned(key)]
        scale = half(length / (math.hypot(*levels) if self.method.correct else unit))
        return [scale * x for x in turned(levels)]

    def value(self, value: list[float]) -> list[float]:
        top = 2**self.method.values - 1
        step = (max(value) - min(value)) / top
        codes = [math.floor((x - min(value)) / step + 0.5) for x in value]
        return [code * half(step) + half(min(value)) for code in codes]


class Think:
    """Channels that few queries look at are zero in all but the newest keys."""

    def __init__(self, ratio: float, recent: int, queries: int) -> None:
        self.ratio, self.recent, self.queries = ratio, recent, queries
        self.dropped: dict[Any, list[int]] = {}

    def __call__(self, segment, columns, keys, values, queries, decoding) -> None:
        if decoding:
            return
        for layer, at in enumerate(columns):
            old = at[: max(0, len(at) - self.recent)]
            if old and (layer, segment) not in self.dropped:
                asked = queries[layer][:, -self.queries :].flatten(0, 1)
                scores = [
                    torch.outer(asked[:, channel], keys[layer][at, channel]).norm().item()
                    for channel in range(SIZE)
                ]
                order = sorted(range(SIZE), key=scores.__getitem__)
                self.dropped[layer, segment] = order[: math.floor(SIZE * self.ratio)]
            for i in old:
                for channel in self.dropped[layer, segment]:
                    keys[layer][i, channel] = 0.0


class Minicache:
    """Entries of two layers get one direction; those whose directions differ most stay."""

    def __init__(self, t: float, gamma: float, first: int, block: int) -> None:
        self.t, self.gamma, self.first, self.block = t, gamma, first, block
        self.done: dict[Any, int] = {}

    def __call__(self, segment, columns, keys, values, queries, decoding) -> None:
        for layer in range(self.first, len(columns), 2):
            at = columns[layer]
            old, n = self.done.get((layer, segment), 0), len(at)
            n = max(old, n - n % self.block) if decoding else n
            self.done[layer, segment] = n
            for part in (keys, values):
                self.merge(part[layer], part[layer + 1], at[old:n])

    def merge(self, one: Tensor, other: Tensor, at: list[int]) -> None:
        pairs = [(one[i].tolist(), other[i].tolist()) for i in at]
        norms = [tuple(math.hypot(*x) for x in pair) for pair in pairs]
        cosines = [
            sum(a * b for a, b in zip(x, y, strict=True)) / (n * m)
            for (x, y), (n, m) in zip(pairs, norms, strict=True)
        ]
        count = -(-round(100 * self.gamma) * len(at) // 100)  # rounded up
        stay = sorted(range(len(at)), key=cosines.__getitem__)[:count]
        for j, (i, (x, y), (n, m)) in enumerate(zip(at, pairs, norms, strict=True)):
            if j in stay:
                continue
            angle = math.acos(cosines[j])
            of_x, of_y = (math.sin(s * angle) / math.sin(angle) for s in (1 - self.t, self.t))
            direction = [of_x * a / n + of_y * b / m for a, b in zip(x, y, strict=True)]
            one[i], other[i] = exact([n * d for d in direction]), exact([m * d for d in direction])


def formula(spec: str) -> Encoding:
    """What a method's last part says, with its options."""
    method = kvfold.parse(spec.split(" + ")[-1])
    if isinstance(method, kvfold.KIVI):
        keys, values = method.key_bits or method.bits, method.value_bits or method.bits
        return Kivi(keys, values, method.group, method.residual)
    if isinstance(method, kvfold.TurboQuant):
        first = method.stages().encode.end_layers
        return Turboquant(method, range(first, 4 - first))
    if isinstance(method, kvfold.ThinK):
        return Think(method.ratio, method.recent, method.queries)
    return Minicache(method.t, method.gamma, int(4 * method.start), method.block)


def read(model: Any, spec: str, lengths: tuple[int, ...] = ALONE) -> Reader:
    """A reader that has read a prompt."""
    return Continued(model, spec, *prompts(lengths))


class Continued(Reader):
    """Goes on after a prompt `ids`, `mask` 0 at padding, which kvfold reads, as KVzip needs."""

    def __init__(self, model: Any, spec: str, ids: Tensor, mask: Tensor) -> None:
        cache = compressed(model, spec, BUDGET, tokenizer=word_tokenizer())
        super().__init__(model, cache, None if bool(mask.all()) else mask)
        self.started = True
        with torch.no_grad():
            read_turn(model, cache, ids, mask, ids.shape[1], ids.shape[1])
        cache.binding.tokenizer = None


def decode(reader: Reader, steps: int, seed: int = 2) -> list[Tensor]:
    rows = len(reader.cache.positions(0))
    return [reader(token) for token in continuation(rows, steps, seed).split(1, 1)]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        *((spec, ALONE) for spec in METHODS if " + " not in spec),
        *((spec, PADDED) for spec in (KIVI, THINK, LATE_THINK, MINICACHE)),
        *((spec, PADDED) for spec in METHODS if " + " in spec),
    ],
)
def test_encoded_caches_are_the_formula(model, second, spec, lengths):
    """A prompt, generated tokens across several flushes, a turn of 12, and tokens again."""
    ids, mask = prompts(lengths)
    mask, rows = mask if len(lengths) > 1 else None, len(lengths)
    reader = read(model, spec, lengths)
    whole, truth = MaskedDense(second, mask), Overwriting(second, formula(spec), mask)
    whole(ids), truth(ids)
    truth.after(reader.cache, decoding=False)
    whole.hide(reader.cache)
    in_lots = re.search("kivi|turboquant", spec)
    count = 20 if not in_lots else 70 if spec == KIVI and lengths == ALONE else 36
    for turn, steps in enumerate((count, 3)):
        text = continuation(rows, steps + 12, seed=turn)
        *tokens, block = [*text[:, :steps].split(1, 1), text[:, steps:]]
        # Without overwriting anything, in one go.
        unchanged = whole(text).split([1] * steps + [12], 1)
        for piece, otherwise in zip((*tokens, block), unchanged, strict=True):
            got, expected = reader(piece), truth(piece)
            assert worst(got, expected) <= 1e-6
            assert worst(otherwise[:1], expected[:1]) > 1e-3
            truth.after(reader.cache, decoding=piece.shape[1] == 1)
        whole.hide(reader.cache)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [ALONE, PADDED])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "adakv:window=8", "rkv:window=8"])
def test_encoded_entries_leave_in_rounds(model, second, spec, lengths):
    """Each round evicts, and then encodes what is due, as at a prompt's end."""
    spec, rows = f"{spec} + every:interval=16 + {TURBO}", len(lengths)
    ids, mask = prompts(lengths)
    mask = mask if rows > 1 else None
    reader = read(model, spec, lengths)
    truth = Overwriting(second, formula(spec), mask)
    truth(ids)
    truth.after(reader.cache, decoding=False)
    for turn in range(2):
        text = continuation(rows, 50 + 12, seed=turn)
        sizes = []
        for step, piece in enumerate((*text[:, :50].split(1, 1), text[:, 50:]), 1):
            assert worst(reader(piece), truth(piece)) <= 1e-6
            truth.after(reader.cache, decoding=piece.shape[1] == 1 and step % 16 > 0)
            sizes.append(sum(map(len, positions(reader.cache)[0][0])))
        assert min(sizes) == 2 * BUDGET and max(sizes) <= 2 * (BUDGET + 16)
        assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in METHODS if " + " in spec])
def test_a_budget_is_spent_before_entries_are_encoded(model, spec):
    kept = read(model, spec, PADDED).cache.stats().kept
    for layer in kept:
        assert sum(layer[2]) == 22
        assert spec.startswith(("adakv", "kvzip")) == any(a != b for a, b in layer)
    for row in range(2):
        assert sum(sum(layer[row]) for layer in kept) == 4 * 2 * BUDGET


# --- nothing due: the stock cache --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["kivi:group=16,residual=128", "think:recent=140"])
def test_what_is_shorter_than_the_residual_is_the_stock_cache(spec, dtype):
    """Prompt, steps, a turn and steps again, 110 tokens in all."""
    model = build("llama", dtype, head_dim=SIZE)
    cache, stock = compressed(model, spec), stock_cache(model)
    readers = [Reader(model, cache), Reader(model, stock)]
    text = continuation(1, 23, seed=3)
    for piece in (prompts(ALONE)[0], *text[:, :6].split(1, 1), text[:, 6:18], text[:, 18:19]):
        assert torch.equal(*(reader(piece) for reader in readers))
    for layer, expected in zip(cache.states, stock.layers, strict=True):
        assert same(list(layer.store.dense()), [expected.keys, expected.values])
    assert cache.stats().position_bytes == 0
    assert not encoded_tensors(cache)


def test_short_rows_beside_long_ones_stay_as_they_came(model):
    """Of 75, 53 and 11 tokens, the last row is shorter than the residual of 16."""
    reader = read(model, KIVI, PADDED)
    stock = Reader(model, stock_cache(model), prompts(PADDED)[1])
    stock(prompts(PADDED)[0])
    for layer, expected in zip(reader.cache.states, stock.cache.layers, strict=True):
        keys, values = layer.store.dense()
        for mine, theirs in ((keys, expected.keys), (values, expected.values)):
            assert torch.equal(mine[2, :, -11:], theirs[2, :, -11:])
            assert not torch.equal(mine[1, :, -53:], theirs[1, :, -53:])


# --- what is encoded stays -------------------------------------------------------------------


def encoded_parts(cache: kvfold.CompressedCache) -> list[Encoded]:
    """All keys, and all values, that are encoded, of one layer after the other."""
    views = [layer.store.view() for layer in cache.states]
    parts = [part.encoded for view in views if isinstance(view, RaggedView) for part in both(view)]
    return [part for part in parts if part is not None and sum(part.lengths)]


def both(view: RaggedView) -> tuple[PartView, PartView]:
    return view.keys, view.values


def encoded_tensors(cache: kvfold.CompressedCache) -> list[Tensor]:
    return [tensor for part in encoded_parts(cache) for tensor in part.tensors()]


def entries(cache: kvfold.CompressedCache) -> list[Tensor]:
    """What is encoded, decoded: one tensor a segment."""
    parts = encoded_parts(cache)
    return [part.segment(i).clone() for part in parts for i in range(len(part.lengths))]


def codes(cache: kvfold.CompressedCache) -> list[Tensor]:
    """Words, scales and minima of packed entries, one tensor a segment."""
    flats = [
        flat
        for part in encoded_parts(cache)
        if isinstance(part, PackedKeys | PackedValues)
        for flat in (part.words, part.scale, part.minimum)
    ]
    return [flat.segment(i).clone() for flat in flats for i in range(len(flat.lengths))]


def begins_with(longer: list[Tensor], shorter: list[Tensor]) -> bool:
    pairs = zip(longer, shorter, strict=True)
    return all(torch.equal(new[: len(old)], old) for new, old in pairs)


@pytest.mark.cases(1)
@pytest.mark.slow
@EACH
def test_questions_with_long_answers_change_nothing(model, spec):
    """Ten questions of 12 tokens, each with an answer longer than the residual of 16."""
    reader = read(model, spec)
    stats, where = reader.cache.stats(), positions(reader.cache)
    before = [tensor.clone() for tensor in encoded_tensors(reader.cache)]
    assert before
    answers = []
    for seed in (*range(1, 10), 1):
        with reader.cache.frozen():
            logits = [reader(continuation(1, 12, seed)), *decode(reader, 18, seed)]
            assert same(encoded_tensors(reader.cache), before)
            reader.cache.crop(-30)
        answers.append(torch.cat(logits, 1))
        assert same(encoded_tensors(reader.cache), before)
        assert reader.cache.stats() == stats and positions(reader.cache) == where
    assert torch.equal(answers[0], answers[-1]) and not torch.equal(answers[0], answers[1])


@pytest.mark.parametrize(("tokens", "packed"), [(64, 32), (95, 32), (96, 64)])
def test_values_that_wait_for_their_lot_are_counted_whole(model, tokens, packed):
    """After 64 tokens in a turn and some while decoding; 32 newer ones follow what is packed."""
    reader = Reader(model, compressed(model, "kivi:group=8,residual=32"))
    reader(prompts((64,))[0])
    for token in continuation(1, 40)[:, : tokens - 64].split(1, 1) if tokens > 64 else ():
        reader(token)
    heads, number = 2, 8  # of a layer; bytes, in float64
    expected = 0
    for layer in reader.cache.states:
        keys, values = (layer.stored()._keys, layer.stored()._values)
        assert values.encoded.lengths == [packed] * heads
        whole = tokens - tokens // 32 * 32 + tokens - packed
        codes = sum(
            t.numel() * t.element_size() for p in (keys, values) for t in p.encoded.tensors()
        )
        expected += codes + heads * whole * SIZE * number
    assert reader.cache.stats().kv_bytes == expected


@pytest.mark.cases(1)
@pytest.mark.slow
@EVERY
def test_tokens_are_taken_back_as_if_never_read_or_not_at_all(model, spec):
    """What older entries were encoded for cannot be undone; it is refused and nothing changes."""
    if "kvzip" in spec:
        spec = spec.removeprefix("kvzip:chunk=50 + ")
    reader = Reader(model, compressed(model, spec, BUDGET))
    reader(prompts((47,))[0])
    steps = continuation(1, 40).split(1, 1)
    twins, refused = [copy.deepcopy(reader.cache)], []
    for token in steps:
        reader(token)
        twins.append(copy.deepcopy(reader.cache))
    for back in range(1, 41):
        cropped, twin = copy.deepcopy(twins[40]), copy.deepcopy(twins[40 - back])
        try:
            cropped.crop(-back)
        except kvfold.KvfoldError as problem:
            assert "encoded" in str(problem) and cropped.get_seq_length() == 87
            refused.append(back)
            continue
        assert not refused  # what cannot be taken back once cannot be together with more
        assert positions(cropped) == positions(twin)
        again = [Reader(model, cache)(steps[0]) for cache in (cropped, twin)]
        assert torch.equal(*again)
    assert bool(refused) == ("think" not in spec)


@pytest.mark.cases(1)
@pytest.mark.slow
@EACH
def test_nothing_is_encoded_twice(spec):
    """200 generated tokens and two more turns only add to what is encoded."""
    model = build("llama", head_dim=SIZE)
    reader = read(model, spec)
    held, packed = entries(reader.cache), codes(reader.cache)
    assert held and bool(packed) == ("kivi" in spec)
    for text in (200, 33, 20, 12):
        steps = continuation(1, text, seed=text)
        for piece in (steps,) if text in (33, 12) else steps.split(1, 1):
            reader(piece)
        now = entries(reader.cache), codes(reader.cache)
        assert begins_with(now[0], held) and begins_with(now[1], packed)
        grown = sum(map(len, now[0])) > sum(map(len, held))
        # ThinK prunes at the end of turns alone, TurboQuant waits for a lot.
        assert grown != (text in {THINK: (200, 20), TURBO: (20,)}.get(spec, ()))
        held, packed = now


# --- rows, copies, files -----------------------------------------------------------------------


ROWS = pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 1]), [2, 0, 1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "repeat"],
)


@pytest.mark.cases(2)
@ROWS
@pytest.mark.parametrize("spec", [s for s in METHODS if s.startswith(("adakv", "kvzip"))])
def test_rows_take_all_that_is_theirs_along(model, spec, change, argument, rows):
    """test_phases does this for every method alone."""
    ids, mask = prompts(PADDED)
    reader = read(model, spec, PADDED)
    straight = Continued(model, spec, ids[rows], mask[rows])
    steps = continuation(3, 26, seed=7)
    for token in steps[:, :4].split(1, 1):
        reader(token), straight(token[rows])
    getattr(reader.cache, change)(argument)
    reader.mask = reader.mask[rows]
    assert positions(reader.cache) == positions(straight.cache)
    for piece in (*steps[:, 4:14].split(1, 1), steps[:, 14:]):
        torch.testing.assert_close(reader(piece[rows]), straight(piece[rows]), atol=1e-6, rtol=0)
    for got, expected in zip(entries(reader.cache), entries(straight.cache), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)


@pytest.mark.slow
@EACH
def test_copies_and_files_continue_like_the_original(model, spec):
    reader = read(model, spec, PADDED)
    decode(reader, 3, seed=5)
    file = io.BytesIO()
    torch.save(reader.cache, file)
    file.seek(0)
    copies = [copy.deepcopy(reader.cache), torch.load(file, weights_only=False)]
    for cache in copies:
        assert cache.stats() == reader.cache.stats() and positions(cache) == positions(reader.cache)
        assert same(encoded_tensors(cache), encoded_tensors(reader.cache))
    second = Reader(model, copies[0], reader.mask)
    second.started = True
    assert same(decode(second, 6), decode(reader, 6))
    assert same(encoded_tensors(second.cache), encoded_tensors(reader.cache))


# --- pairs share memory ------------------------------------------------------------------------


def shared(cache: kvfold.CompressedCache) -> list[set[int]]:
    """What the keys, and the values, of the two paired layers have in common: addresses."""
    keys, values, partner_keys, partner_values = (
        {tensor.data_ptr() for tensor in part.tensors()} for part in encoded_parts(cache)
    )
    return [keys & partner_keys, values & partner_values]


def assert_pairs_share(cache: kvfold.CompressedCache) -> None:
    """Directions and the retained entries' indices, of keys and of values."""
    assert [len(common) for common in shared(cache)] == [2, 2]
    assert counted_bytes(cache) == reachable_bytes(cache)


def test_pairs_go_on_sharing(model):
    reader = read(model, MINICACHE, PADDED)
    rows, start = continuation(3, 32, seed=8), reader.cache.stats().kv_bytes
    assert_pairs_share(reader.cache)
    reader.cache.reorder_cache(torch.tensor([1, 2, 0]))
    reader.mask = reader.mask[[1, 2, 0]]
    assert_pairs_share(reader.cache)
    assert reader.cache.stats().kv_bytes == start
    for piece in (*rows[:, :20].split(1, 1), rows[:, 20:]):
        reader(piece)
        assert_pairs_share(reader.cache)
    held = reader.cache.stats().kv_bytes
    twin = copy.deepcopy(reader.cache)
    assert_pairs_share(twin)
    assert twin.stats() == reader.cache.stats()
    assert not {t.data_ptr() for t in encoded_tensors(twin)} & {
        t.data_ptr() for t in encoded_tensors(reader.cache)
    }
    reader.cache.batch_repeat_interleave(2)
    assert_pairs_share(reader.cache)
    assert reader.cache.stats().kv_bytes == 2 * held
    reader.cache.batch_select_indices(torch.tensor([0, 2, 4]))
    assert_pairs_share(reader.cache)
    assert reader.cache.stats().kv_bytes == held


# --- what it costs -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(3)
@EVERY
def test_bytes_are_those_of_all_storages_alive(model, spec):
    reader = read(model, spec, PADDED)
    turn = continuation(3, 12, seed=9)
    for piece in (*turn[:, :3].split(1, 1), turn, turn[:, :1]):
        assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
        reader(piece)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
    for cache in (reader.cache, copy.deepcopy(reader.cache)):
        cache.batch_repeat_interleave(2)
        assert counted_bytes(cache) == reachable_bytes(cache)


ENDING = [
    ("kivi:group=8,residual=8", None),
    ("snapkv:window=8 + kivi:group=8,residual=8", 20),
    ("turboquant:residual=8,sinks=2,end_layers=0", None),
    ("minicache:block=8", None),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("spec", "budget"), ENDING, ids=str)
@pytest.mark.parametrize("steps", [3, 40])
def test_padding_of_rows_that_ended_is_not_encoded(model, spec, budget, steps):
    """A row that ends while others go on answers its next turn as it does alone."""
    ids, tokens, turn = (
        torch.cat([prompts((n,), seed=seed)[0] for seed in seeds])
        for n, seeds in ((40, (1, 2)), (steps, (3, 4)), (7, (5, 6)))
    )
    tokens[1] = 0  # padding
    mask = torch.ones(2, 40, dtype=torch.long)
    together = Reader(model, kvfold.CompressedCache(model, spec, budget), mask)
    alone = Reader(model, kvfold.CompressedCache(model, spec, budget))
    together(ids)
    alone(ids[1:])
    for token in tokens.split(1, 1):
        together(token)
    for piece in turn.split((6, 1), 1):
        ours, own = together(piece)[1, -1], alone(piece[1:])[0, -1]
        torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)
