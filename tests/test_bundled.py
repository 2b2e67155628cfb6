# SPDX-License-Identifier: Apache-2.0
"""The bundled model answers from a document, and methods differ in what they leave of it."""

import json
import random
import statistics
from functools import partial

import pytest
from safetensors import safe_open

import kvfold
from kvfold.bundled import FOLDER
from kvfold.eval import short_ruler
from kvfold.eval.short_ruler_scores import RetrievalTrial, retrieval_scores
from kvfold.eval.tasks.vocabulary import ADJECTIVES, NOUNS, Vocabulary
from kvfold.hf.chat_template import token_count

SAMPLES = 30
# Words that neither the tokenizer nor the lists of the tasks have.
OTHERS = Vocabulary(
    ("amber", "dusty", "icy", "velvet", "rusty", "spiral", "hollow", "crimson", "thorny", "misty"),
    ("lantern", "sparrow", "walnut", "thimble", "harpoon", "glacier", "trumpet", "saddle", "fern"),
)


@pytest.fixture(scope="module")
def bundled():
    return kvfold.bundled_model()


def score(bundled, trial, samples=SAMPLES):
    return statistics.mean(o.score for o in retrieval_scores(*bundled, trial, samples, seed=1))


def test_it_is_small_grouped_and_long(bundled):
    config = bundled[0].config
    assert config.num_hidden_layers >= 4
    assert 2 <= config.num_attention_heads // config.num_key_value_heads <= 4
    assert config.num_key_value_heads >= 2
    assert config.max_position_embeddings >= 2 * 2048 + 256


def test_digits_and_keys_are_whole_tokens(bundled):
    _, tokenizer = bundled
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in ADJECTIVES)
    assert all(len(tokenizer.tokenize(f"-{word}")) == 2 for word in NOUNS)
    assert tokenizer.tokenize("1234") == ["12", "34"]
    text = "One of the special magic numbers for quick-table is: 1234567."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.slow
def test_it_finds_a_needle_in_noise(bundled):
    assert score(bundled, RetrievalTrial("single", 1024)) >= 0.9


@pytest.mark.whole
def test_it_tells_four_needles_apart(bundled):
    assert score(bundled, RetrievalTrial("multikey", 512)) >= 0.8


@pytest.mark.whole
@pytest.mark.parametrize("prefixed", [True, False])
def test_it_tells_needles_of_other_words_apart(bundled, prefixed):
    """Also where `ask` is given nothing to begin its answer with."""
    model, tokenizer = bundled
    count, rng, scores = partial(token_count, tokenizer), random.Random(4), []
    for _ in range(20):
        sample = short_ruler.generate("multikey", 400, count, rng, vocabulary=OTHERS)
        question = sample.questions[0]
        context = kvfold.compress(model, tokenizer, sample.document, "full")
        prefix = question.prefix if prefixed else ""
        scores.append(question.score(context.ask(question.text, answer_prefix=prefix)))
    assert statistics.mean(scores) >= 0.7


@pytest.mark.whole
@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["snapkv", "pyramidkv"])
def test_a_method_that_sees_the_question_beats_chance(bundled, method):
    aware = score(bundled, RetrievalTrial("multikey", 512, method, 0.2))
    for blind in ("random", "streaming_llm"):
        assert aware >= 2 * score(bundled, RetrievalTrial("multikey", 512, blind, 0.2))


@pytest.mark.whole
def test_a_full_budget_changes_no_answer(bundled):
    full = [o.score for o in retrieval_scores(*bundled, RetrievalTrial("multikey", 512), 5)]
    for method in ("snapkv", "h2o", "streaming_llm"):
        trial = RetrievalTrial("multikey", 512, method, 1.0)
        assert [o.score for o in retrieval_scores(*bundled, trial, 5)] == full


@pytest.mark.whole
def test_bytes_follow_the_kept_fraction_at_four_thousand_tokens(bundled):
    model, tokenizer = bundled
    text = " ".join(short_ruler.NOISE) * 200
    document = tokenizer.decode(tokenizer(text).input_ids[:4095])
    for method in ("snapkv", "pyramidkv", "knorm", "random", "streaming_llm", "tova", "h2o"):
        stats = kvfold.compress(model, tokenizer, document, method, 0.2).stats()
        assert (stats.nbytes - stats.slack_bytes) / stats.nbytes_full == pytest.approx(
            0.2, abs=0.02
        )
        assert stats.kept_fraction == pytest.approx(0.2, abs=1e-3)


@pytest.mark.slow
def test_questions_do_not_see_each_other(bundled):
    model, tokenizer = bundled
    document = "One of the special magic numbers for quick-table is: 1234567."
    context = kvfold.compress(model, tokenizer, document, "knorm", 0.8)
    first = context.ask("What is the special magic number for quick-table?")
    context.ask("Which variables are there?")
    assert context.ask("What is the special magic number for quick-table?") == first
    assert context.cache.get_seq_length() == context.stats().seen


def test_an_index_names_the_weights_beside_fitted_files():
    """Engines such as vLLM read every safetensors file of a folder that has no index."""
    named = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert set(named) == set(file.keys())
    assert set(named.values()) == {"model.safetensors"}
    assert len(list(FOLDER.glob("*.safetensors"))) > 1
