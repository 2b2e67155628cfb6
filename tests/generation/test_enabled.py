# SPDX-License-Identifier: Apache-2.0
"""Plain `model.generate` of an enabled model: an explicit cache's answers, from any thread."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, pipeline

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.caches import GREEDY
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import stock_cache

EVERY = "knorm + every:interval=4"


@pytest.fixture
def model() -> Any:
    return build("llama", torch.float64)


def explicit(model: Any, ids: Any, mask: Any, method: str, budget: Any, **options: Any) -> Any:
    cache = CompressedCache(model, method, budget)
    return kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "budget"), [("snapkv:window=8", 20), ("h2o", 0.3), ("kivi:group=8", None)]
)
@pytest.mark.parametrize("lengths", [(64,), (64, 40, 52)])
def test_an_enabled_model_answers_as_an_explicit_cache(model, method, budget, lengths):
    ids, mask = prompts(lengths)
    expected = explicit(model, ids, mask, method, budget)
    kvfold.enable(model, method, budget)
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    config = GenerationConfig(**GREEDY)
    assert torch.equal(
        model.generate(inputs=ids, attention_mask=mask, generation_config=config), expected
    )


def test_options_of_the_cache_and_of_generate(model):
    ids, mask = prompts((64,))
    expected = explicit(model, ids, mask, EVERY, 20, prefill_chunk=16, num_beams=2)
    kvfold.enable(model, "knorm", 20, every=4, prefill_chunk=16)
    got = model.generate(
        ids, attention_mask=mask, num_beams=2, return_dict_in_generate=True, **GREEDY
    )
    assert torch.equal(got.sequences, expected)
    assert isinstance(got.past_key_values, CompressedCache)
    assert got.past_key_values.stats().kept_fraction < 0.5


@pytest.mark.slow
def test_two_threads_at_once(model):
    texts = [prompts((length,)) for length in (64, 50, 40, 33)]
    expected = [explicit(model, ids, mask, "snapkv:window=8", 20) for ids, mask in texts]
    kvfold.enable(model, "snapkv:window=8", 20)
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda text: model.generate(text[0], attention_mask=text[1], **GREEDY), texts * 3
            )
        )
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 3, strict=True))


def test_a_disabled_model_is_stock_bit_for_bit(model):
    ids, mask = prompts((64, 40))
    options = {"output_logits": True, "return_dict_in_generate": True} | GREEDY
    expected = model.generate(ids, attention_mask=mask, **options)
    with kvfold.enable(model, "snapkv:window=8", 20):
        assert "generate" in vars(model)
    assert "generate" not in vars(model)
    found = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(
        torch.equal(one, other) for one, other in zip(found.logits, expected.logits, strict=True)
    )


def test_enabling_again_replaces_the_method(model):
    ids, mask = prompts((64,))
    kvfold.enable(model, "streaming_llm", 20)
    kvfold.enable(model, "snapkv:window=8", 20)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **GREEDY),
        explicit(model, ids, mask, "snapkv:window=8", 20),
    )
    kvfold.disable(model)
    assert "generate" not in vars(model)


def test_after_an_inner_block_the_outer_method_is_back(model):
    ids, mask = prompts((64,))
    stock = model.generate(ids, attention_mask=mask, **GREEDY)
    expected = [explicit(model, ids, mask, method, 20) for method in ("knorm", "keydiff")]
    assert not torch.equal(*expected)
    with kvfold.enable(model, "knorm", 20):
        with kvfold.enable(model, "keydiff", 20):
            assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected[1])
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected[0])
        with pytest.raises(KvfoldError, match="continuous batching"):
            model.generate_batch(inputs=[[5, 6]])
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), stock)


def test_calls_with_a_cache_of_their_own_stay_stock(model):
    ids, mask = prompts((64,))
    expected = model.generate(
        ids, attention_mask=mask, past_key_values=stock_cache(model), **GREEDY
    )
    kvfold.enable(model, "streaming_llm", 10)
    found = model.generate(ids, attention_mask=mask, past_key_values=stock_cache(model), **GREEDY)
    assert torch.equal(found, expected)
    cache = CompressedCache(model, "snapkv:window=8", 20)
    found = kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY)
    assert torch.equal(found, explicit(model, ids, mask, "snapkv:window=8", 20))


def test_transformers_text_generation_pipeline(model):
    tokenizer = word_tokenizer()
    ids = tokenizer(DOCUMENT, return_tensors="pt").input_ids
    small = build("llama", torch.float64, vocab_size=len(tokenizer))
    expected = tokenizer.decode(explicit(small, ids, torch.ones_like(ids), "knorm", 40)[0])
    pipe = pipeline("text-generation", model=small, tokenizer=tokenizer)
    with kvfold.enable(small, "knorm", 40):
        found = pipe(DOCUMENT, return_full_text=True, **GREEDY)[0]["generated_text"]
    assert found.split()[-5:] == expected.split()[-5:]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "streaming_llm", EVERY])
@pytest.mark.parametrize("lengths", [(64,), (64, 40, 52)])
def test_embeddings_are_read_into_a_fresh_cache(model, spec, lengths):
    ids, mask = prompts(lengths)
    embedded = model.get_input_embeddings()(ids).detach()
    expected = explicit(model, ids, mask, spec, 20)[:, 64:]
    kvfold.enable(model, spec, 20)
    options = {"attention_mask": mask, "return_dict_in_generate": True, **GREEDY}
    for _ in range(2):
        made = model.generate(inputs_embeds=embedded, **options)
        assert torch.equal(made.sequences, expected)
        assert made.past_key_values.stats().kept_fraction < 0.6


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("pyramidinfer", {}, "pyramidinfer reads the prompt's ids, which inputs_embeds= lacks"),
        ("kvzip", {}, "kvzip reads the prompt's ids"),
        ("knorm", {"prefill_chunk": 16}, "prefill_chunk needs the prompt's ids"),
        ("knorm", {"reuse": "prefix"}, "reuse needs the prompt's ids"),
    ],
)
def test_embeddings_are_refused_where_ids_are_read(model, spec, options, reason):
    embedded = model.get_input_embeddings()(prompts((64,))[0]).detach()
    budget = None if spec == "pyramidinfer" else 40
    kvfold.enable(model, spec, budget, tokenizer=word_tokenizer())
    with pytest.raises(KvfoldError, match=reason):
        model.generate(inputs_embeds=embedded, **options, **GREEDY)


@notices_drops
def test_embeddings_are_refused_where_the_model_drops_its_cache():
    model = longrope()
    kvfold.enable(model, "knorm", 20)
    embedded = model.get_input_embeddings()(prompts((20,))[0]).detach()
    with pytest.raises(KvfoldError, match=r"Phi3ForCausalLM keeps a cache only if .* input_ids"):
        model.generate(inputs_embeds=embedded, **GREEDY)


def test_embeddings_of_a_text_that_is_too_long():
    model = build("llama", max_position_embeddings=32)
    embedded = model.get_input_embeddings()(prompts((40,))[0]).detach()
    kvfold.enable(model, "knorm", 20)
    with pytest.raises(KvfoldError, match="allow_longer=True"):
        model.generate(inputs_embeds=embedded, **GREEDY)
    made = model.generate(inputs_embeds=embedded, allow_longer=True, **GREEDY)
    assert made.shape == (1, GREEDY["max_new_tokens"])


def batched(model: Any) -> list[list[int]]:
    """What transformers' continuous batching generates for two prompts, in a small paged cache."""
    made = model.generate_batch(
        [[5, 6, 7, 8], [9, 10, 11]],
        GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16),
        warmup=False,
    )
    return [request.generated_tokens for _, request in sorted(made.items())]


@pytest.mark.whole
def test_continuous_batching_has_the_stock_attention(model):
    expected, (ids, mask) = batched(model), prompts((64,))
    answer = explicit(model, ids, mask, "snapkv:window=8", 20)
    assert batched(model) == expected
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(explicit(model, ids, mask, "snapkv:window=8", 20), answer)
    kvfold.disable(model)
    assert batched(model) == expected


def test_continuous_batching_would_not_compress(model):
    kvfold.enable(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match=r"generate_batch.* kvfold\.disable\(model\)"):
        batched(model)
    kvfold.disable(model)
    assert "init_continuous_batching" not in vars(model)


def test_what_does_not_go_together_is_refused(model):
    ids, mask = prompts((64,))
    for given in ({"budget": 0.3}, {"budget": 0.0}, {"every": 0}, {"prefill_chunk": 0}):
        with pytest.raises(KvfoldError, match="name a method"):
            kvfold.enable(model, **given)
    with pytest.raises(KvfoldError, match="needs a budget"):
        kvfold.enable(model, "snapkv")
    assert "generate" not in vars(model)
    kvfold.enable(model, "snapkv:window=8", 20)
    for options in ({"cache_implementation": "static"}, {"use_cache": False}):
        with pytest.raises(KvfoldError, match="another cache"):
            model.generate(ids, attention_mask=mask, **options, **GREEDY)
    with pytest.raises(KvfoldError, match="input_ids"):
        model.generate(**GREEDY)
    with pytest.raises(KvfoldError, match=r"input_ids \[1, 0\] hold no token"):
        model.generate(ids[:, :0], **GREEDY)


def test_caches_made_before_a_block_go_on_after_it():
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    chat = context.chat()
    said = [context.ask(QUESTION, max_new_tokens=4), chat.ask(QUESTION, max_new_tokens=4)]
    with kvfold.enable(model, "snapkv", 0.5):
        assert "generate" in vars(model)
    assert "generate" not in vars(model)
    assert context.ask(QUESTION, max_new_tokens=4) == said[0]
    assert chat.ask(QUESTION, max_new_tokens=4)
    kvfold.disable(model)


def test_an_enabled_model_is_called_as_transformers_is(model):
    ids = torch.arange(3, 40)[None]
    with kvfold.enable(model, "snapkv:window=8", 0.5):
        plain = model.generate(ids, max_new_tokens=4, do_sample=False)
        as_given = model.generate(
            ids, None, [], past_key_values=None, max_new_tokens=4, do_sample=False
        )
        assert torch.equal(plain, as_given)
        embeddings = model.get_input_embeddings()(ids)
        assert model.generate(
            inputs_embeds=embeddings, past_key_values=None, max_new_tokens=2
        ).numel()


@pytest.fixture
def enabled_once(model):
    """The warning that its first forward gives, if any: `warned(call)`."""

    def warned(call: Any) -> str:
        with kvfold.enable(model, "knorm", 0.1), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                call()
        return " ".join(str(each.message) for each in found)

    return warned


@pytest.mark.parametrize(
    ("forward", "result"),
    [
        (lambda model, ids: model(ids, labels=ids), "the loss of this forward"),
        (lambda model, ids: model(ids, labels=ids, use_cache=False), "the loss of this forward"),
        (lambda model, ids: model(ids, None, None, None, None, ids), "the loss of this forward"),
        (lambda model, ids: model(ids).logits, "the cache of this forward"),
        (lambda model, ids: model(ids, past_key_values=None), "the cache of this forward"),
        (
            lambda model, ids: torch.compile(model, backend="eager", fullgraph=True)(
                ids, labels=ids, use_cache=False
            ),
            "the loss of this forward",
        ),
    ],
)
@torch.no_grad()
def test_a_forward_without_a_cache_warns_once(model, enabled_once, forward, result):
    ids = prompts((40,))[0]
    message = enabled_once(lambda: forward(model, ids))
    assert result in message and message.count("past_key_values=cache, labels=text") == 1


@pytest.mark.slow
@torch.no_grad()
def test_what_compresses_or_keeps_nothing_warns_of_nothing(model, enabled_once):
    ids, cache = prompts((40,))[0], CompressedCache(model, "knorm", 0.1)
    assert not enabled_once(lambda: model(ids, use_cache=False))
    assert not enabled_once(lambda: model(ids, past_key_values=cache, labels=ids))
    assert not enabled_once(lambda: model.generate(ids, **GREEDY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=ids)


@pytest.mark.parametrize(
    ("method", "budget"), [("full", None), ("streaming_llm:positions=original", 12)]
)
@torch.no_grad()
def test_the_loss_of_a_text_behind_a_compressed_context(model, method, budget):
    """As the warning has it; StreamingLLM keeps four sinks and the newest eight."""
    ids = prompts((64,))[0]
    context, text = ids[:, :40], ids[:, 40:]
    cache = CompressedCache(model, method, budget)
    model(context, past_key_values=cache)
    loss = model(text, past_key_values=cache, labels=text).loss
    hidden = torch.ones(64, 64, dtype=torch.bool).tril()
    if budget:
        hidden[40:, 4:32] = False
    logits = model(ids, attention_mask=hidden[None, None]).logits[0, 40:-1]
    expected = torch.nn.functional.cross_entropy(logits.float(), text[0, 1:])
    torch.testing.assert_close(loss, expected)
