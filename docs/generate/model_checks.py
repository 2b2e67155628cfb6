# SPDX-License-Identifier: Apache-2.0
"""Six checks of a model under kvfold, against transformers' own cache or an independent truth."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import kvfold
from docs.generate.tiny_models import TEXT_IDS, tiny_model
from kvfold.hf.stock_layers import is_recurrent
from kvfold.serve.app import build
from kvfold.serve.engine import Engine
from kvfold.serve.settings import ServerSettings
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

METHOD, BUDGET = "snapkv:window=4", 16
PROMPT, SHORTER, NEW, BLOCK, CHUNK = 40, (40, 31, 18), 5, 6, 13
# Largest difference between two ways to compute the same
EXACT = {torch.float64: 1e-6, torch.float32: 1e-4}
UNLIKE = 1e-3  # logits that differ by more are not the same
RIGHT, REFUSED, WRONG, UNTOLD = "right", "refused", "wrong", "untold"


@dataclass(frozen=True)
class Outcome:
    """`right`; `refused`, with KvfoldError's reason; `wrong`; `untold` where nothing can tell."""

    verdict: str
    why: str = ""


@dataclass
class Subject:
    """A model under test, and a copy of it that kvfold never touches."""

    model: PreTrainedModel
    plain: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        if self.model.can_generate():
            for setting in ("eos_token_id", "forced_eos_token_id", "suppress_tokens"):
                setattr(self.model.generation_config, setting, None)
            self.model.generation_config.pad_token_id = 0
        self.plain = copy.deepcopy(self.model)

    @classmethod
    def of(cls, name: str) -> Subject:
        """A class in float64, or in float32 where its own code needs that."""
        subject = cls(tiny_model(name, torch.float64))
        return subject if subject.is_finite() else cls(tiny_model(name, torch.float32))

    def is_finite(self) -> bool:
        """True if a padded batch has finite logits without kvfold; True for encoder-decoders."""
        if self.plain.config.is_encoder_decoder:
            return True
        ids, mask = padded_ids()
        try:
            logits = self.plain(input_ids=ids, attention_mask=mask).logits
        except Exception:
            return False
        return bool(torch.isfinite(logits).all())

    @property
    def exact(self) -> float:
        """Largest difference of equal logits; recurrent layers compute in float32 inside."""
        recurrent = any(map(is_recurrent, stock_cache(self.plain).layers))
        return EXACT[torch.float32 if recurrent else self.model.dtype]

    @cached_property
    def mask(self) -> Tensor | None:
        """A mask `[1, N]` of ones for models that cannot read on without one."""
        reader = Reader(self.plain, stock_cache(self.plain))
        try:
            _ = [reader(piece) for piece in _pieces()]
        except Exception:
            return torch.ones(1, PROMPT, dtype=torch.long)
        return None

    def readers(self, budget: float) -> tuple[Reader, Reader]:
        """Transformers' own cache and a compressed one, each with its model."""
        return (
            Reader(self.plain, stock_cache(self.plain), self.mask),
            Reader(self.model, self.cache(budget), self.mask),
        )

    def cache(self, budget: float = BUDGET) -> kvfold.CompressedCache:
        """A fresh cache."""
        return kvfold.CompressedCache(self.model, METHOD, budget)

    def answers(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits `[B, S, V]` of new tokens, compressed."""
        made = kvfold.generate(
            self.model, ids, cache=self.cache(), attention_mask=mask, **options, **GREEDY
        )
        return torch.stack(made.logits, 1)

    @cached_property
    def whole(self) -> Tensor:
        """Logits of new tokens after the prompt as a whole."""
        return self.answers(token_ids(1, PROMPT))


GREEDY: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def token_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random ids of text."""
    return torch.randint(*TEXT_IDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded_ids() -> tuple[Tensor, Tensor]:
    """Ids of three prompts, padded on the left, and their mask."""
    mask = (torch.arange(PROMPT) >= PROMPT - torch.tensor(SHORTER)[:, None]).long()
    return token_ids(len(SHORTER), PROMPT) * mask, mask


def full(subject: Subject) -> Outcome:
    """With a full budget, logits are bit for bit those of transformers' own cache."""
    stock, ours = subject.readers(1.0)
    for piece in _pieces():
        expected, got = stock(piece), ours(piece)
        if not bool(torch.isfinite(expected).all()):
            return Outcome(UNTOLD, "random weights give no finite logits")
        if not torch.equal(expected, got):
            return Outcome(WRONG, f"differs by {worst(expected, got):.0e}")
    return Outcome(RIGHT)


def evicted(subject: Subject) -> Outcome:
    """After eviction, logits are those of dense attention with evicted entries masked."""
    plain, ours = subject.readers(BUDGET)
    truth = MaskedDense(copy.deepcopy(subject.plain), subject.mask)
    cache: Any = ours.cache
    written = {getattr(m, "layer_idx", None) for m in subject.plain.modules()} - {None}
    if len(written) < len(cache.layers):
        return Outcome(UNTOLD, "a module attends in several layers, which the truth cannot follow")
    first, *later = _pieces()
    noise = worst(plain(first), truth(first))
    if noise > UNLIKE:
        return Outcome(UNTOLD, "its logits have terms that the dense truth does not know")
    ours(first)
    truth.hide(cache)
    off, effect = 0.0, 0.0
    for piece in later:
        everything, expected, got = plain(piece), truth(piece), ours(piece)
        off, effect = max(off, worst(got, expected)), max(effect, worst(everything, expected))
    bound = max(subject.exact, 3 * noise)
    if effect < 100 * bound:
        return Outcome(UNTOLD, "eviction changes too little to tell")
    return Outcome(RIGHT) if off <= bound else Outcome(WRONG, f"differs by {off:.0e}")


def padded(subject: Subject) -> Outcome:
    """Rows of a left-padded batch get the logits that they get alone."""
    ids, mask = padded_ids()
    together = subject.answers(ids, mask)
    ours = _most(
        worst(together[i], subject.answers(ids[i : i + 1, -n:])[0]) for i, n in enumerate(SHORTER)
    )
    if ours <= subject.exact:
        return Outcome(RIGHT)
    batch = _stock_logits(subject, ids, mask)
    stock = _most(
        worst(batch[i], _stock_logits(subject, ids[i : i + 1, -n:], mask[i : i + 1, -n:])[0])
        for i, n in enumerate(SHORTER)
    )
    if stock > UNLIKE:
        return Outcome(UNTOLD, "rows differ with transformers' own cache, too")
    return Outcome(RIGHT) if ours <= 3 * stock else Outcome(WRONG, f"differs by {ours:.0e}")


def chunked(subject: Subject) -> Outcome:
    """A prompt read in pieces gives the logits of the prompt read at once."""
    off = worst(subject.answers(token_ids(1, PROMPT), prefill_chunk=CHUNK), subject.whole)
    if off <= subject.exact:
        return Outcome(RIGHT)
    plain = _stock_logits(subject, token_ids(1, PROMPT), None)
    stock = worst(plain, _stock_logits(subject, token_ids(1, PROMPT), None, chunk=CHUNK))
    if stock > UNLIKE:
        return Outcome(UNTOLD, "pieces differ with transformers' own cache, too")
    return Outcome(RIGHT) if off <= 3 * stock else Outcome(WRONG, f"differs by {off:.0e}")


def saved(subject: Subject) -> Outcome:
    """A context that was saved and loaded answers as before."""
    context = _context(subject)
    before = context.ask(QUESTION, max_new_tokens=NEW)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "context.kvfold"
        context.save(path)
        loaded = kvfold.load(path, subject.model, TOKENIZER)
    same = loaded.ask(QUESTION, max_new_tokens=NEW) == before
    return Outcome(RIGHT) if same else Outcome(WRONG, "answers differ")


def served(subject: Subject) -> Outcome:
    """The endpoint answers a question about a context as the library does."""
    expected = _context(subject).ask(QUESTION, max_new_tokens=NEW)
    engine = Engine("tiny", subject.model, TOKENIZER, ServerSettings(METHOD, BUDGET))
    try:
        client = TestClient(build(engine))
        made = client.post("/v1/contexts", json={"text": TEXT})
        if made.status_code != 201:
            return Outcome(WRONG, made.text)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": NEW,
            "temperature": 0,
            "context_id": made.json()["id"],
        }
        answered = client.post("/v1/chat/completions", json=body)
        if answered.status_code != 200:
            return Outcome(WRONG, answered.text)
        text = answered.json()["choices"][0]["message"]["content"]
    finally:
        engine.close()
    return Outcome(RIGHT) if text == expected else Outcome(WRONG, "answers differ")


CHECKS: dict[str, Callable[[Subject], Outcome]] = {
    check.__name__: check for check in (full, evicted, padded, chunked, saved, served)
}


def check(name: str) -> dict[str, Outcome]:
    """Outcomes of all checks of a class; under "cache" alone where it is refused, or not built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = Subject.of(name)
        except Exception as problem:
            return {"cache": Outcome(UNTOLD, _line(problem))}
        made = _outcome(lambda s: Outcome(RIGHT, s.cache().binding.name), subject)
        if made.verdict == RIGHT:
            return {of: _outcome(function, subject) for of, function in CHECKS.items()}
        return {"cache": made}


def _outcome(function: Callable[[Subject], Outcome], subject: Subject) -> Outcome:
    try:
        return function(subject)
    except kvfold.KvfoldError as refused:
        return Outcome(REFUSED, _line(refused))
    except Exception as problem:
        return Outcome(WRONG, f"{type(problem).__name__}: {_line(problem)}")


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


def _pieces() -> list[Tensor]:
    """A prompt, single tokens, and a block."""
    later = token_ids(1, NEW + BLOCK, seed=2)
    return [token_ids(1, PROMPT), *later[:, :NEW].split(1, 1), later[:, NEW:]]


def _most(differences: Any) -> float:
    return float(max(differences))


def _stock_logits(
    subject: Subject, ids: Tensor, mask: Tensor | None, chunk: int | None = None
) -> Tensor:
    """Logits `[B, S, V]` of new tokens with transformers' own cache."""
    given = torch.ones_like(ids) if mask is None else mask
    options = GREEDY if chunk is None else GREEDY | {"prefill_chunk_size": chunk}
    plain: Any = subject.plain
    made = plain.generate(input_ids=ids, attention_mask=given, **options)
    return torch.stack(made.logits, 1)


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<bos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *map(str, range(*TEXT_IDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")


TOKENIZER = _tokenizer()
TEXT = str(TOKENIZER.decode(token_ids(1, PROMPT)[0]))
QUESTION = str(TOKENIZER.decode(token_ids(1, BLOCK, seed=2)[0]))


def _context(subject: Subject) -> Any:
    return kvfold.compress(subject.model, TOKENIZER, TEXT, METHOD, BUDGET)
