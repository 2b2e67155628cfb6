# SPDX-License-Identifier: Apache-2.0
"""KVzip: what repeating the document keeps, its budget, and head scores from a file."""

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError, parse
from kvfold.hf.chat_template import Frame, token_ids
from kvfold.methods.kvzip import INSTRUCTION, PREVIOUS, REPEAT, REPEAT_FROM
from tests.helpers.models import build, prompts

LENGTHS = (64, 53, 24)


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def kept(model, spec, budget=None):
    """Entries after a padded prefill: `[L][B][H]`."""
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, spec, budget)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return torch.tensor(cache.stats().kept), cache


def test_kvzip_asks_as_the_released_code_does():
    how = parse("kvzip:chunk=100").stages().needs.reconstruction
    assert (how.chunk, how.first, how.later, how.previous) == (100, REPEAT, REPEAT_FROM, PREVIOUS)
    assert REPEAT == "\n\nRepeat the previous context exactly."
    assert REPEAT_FROM.endswith("starting with ") and PREVIOUS == 8
    assert parse("kvzip").stages().needs.reconstruction.chunk == 2000


@pytest.mark.parametrize(
    ("options", "missing"), [("", 0), ("strict=true", 1), ("level=uniform", 0), ("level=head", 0)]
)
def test_kvzip_spends_its_budget_over_all_layers_and_heads(options, missing):
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    context = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 20)
    # What opens the chat is kept beside the budget.
    opening = len(token_ids(tokenizer, Frame.of(tokenizer).before)[0])
    counts = torch.tensor(context.stats().kept)[:, 0] - opening
    heads, whole = counts.numel(), context.stats().seen - opening
    if options == "level=uniform":
        assert counts.eq(20).all()
    elif options == "level=head":
        assert set(counts.flatten().tolist()) == {0, whole}
        assert (counts == whole).sum() == heads * 20 // whole
    else:
        assert counts.sum() == heads * 20 - missing
        assert counts.unique().numel() > 4


def test_kvzip_strict_spends_what_the_released_threshold_leaves():
    """Which is int(r·N) − 1 of all N pairs, and not r of each head's, rounded down."""
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = len(token_ids(tokenizer, Frame.of(tokenizer).before)[0])
    kept = {}
    for options in ("strict=true", "strict=false"):
        stats = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 0.29).stats()
        counts = torch.tensor(stats.kept)[:, 0] - opening
        kept[options], tokens = int(counts.sum()), stats.seen - opening
    heads = counts.numel()
    assert int(0.29 * tokens) * heads < int(0.29 * tokens * heads) - 1
    assert kept["strict=true"] == int(0.29 * tokens * heads) - 1
    assert kept["strict=false"] == int(0.29 * tokens) * heads


def test_kvzip_may_put_the_released_instruction_before_the_document():
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = Frame.of(tokenizer).before
    with_it = kvfold.compress(small, tokenizer, text, "kvzip:instruction=true", 20)
    expected = token_ids(tokenizer, opening + INSTRUCTION)
    assert torch.equal(with_it.ids[:, : expected.shape[1]].cpu(), expected)
    assert with_it.stats().protected == [expected.shape[1]]
    without = kvfold.compress(small, tokenizer, text, "kvzip", 20)
    assert without.stats().protected == [len(token_ids(tokenizer, opening)[0])]
    assert INSTRUCTION.startswith("Given the context, answer to the following question")
    cache = CompressedCache(small, "kvzip:instruction=true", 20, tokenizer=tokenizer)
    with pytest.raises(KvfoldError, match=r"does not begin with.*use kvfold\.compress"):
        kvfold.generate(small, token_ids(tokenizer, opening, text), cache=cache, max_new_tokens=1)


def test_kvzip_head_scores_that_do_not_fit_are_refused(tmp_path):
    small, tokenizer = kvfold.bundled_model()

    def compress(file):
        spec = f"kvzip:level=head,head_scores={file}"
        return kvfold.compress(small, tokenizer, "the old house was quiet", spec, 0.5)

    config = small.config
    shape = config.num_hidden_layers, config.num_key_value_heads
    for name, held in (
        ("other.pt", torch.rand(shape[0] + 1, shape[1])),
        ("nan.pt", torch.full(shape, torch.nan)),
        ("list.pt", [1, 2]),
    ):
        torch.save(held, tmp_path / name)
    (tmp_path / "text.pt").write_text("no tensor")
    (tmp_path / "text.safetensors").write_text("no tensor")
    with pytest.raises(KvfoldError, match=rf"scores {shape[0] + 1} layers.*model has {shape[0]}"):
        compress(tmp_path / "other.pt")
    for name in ("nan.pt", "list.pt", "text.pt", "text.safetensors", "absent.pt"):
        with pytest.raises(KvfoldError, match=rf"cannot read .*{name} as scores of heads"):
            compress(tmp_path / name)
    with pytest.raises(KvfoldError, match="choose level=head"):
        parse("kvzip:head_scores=a.pt")


def test_a_context_made_with_head_scores_is_loaded_without_their_file(tmp_path):
    small, tokenizer = kvfold.bundled_model()
    scores = tmp_path / "heads.pt"
    torch.save(torch.rand(small.config.num_hidden_layers, small.config.num_key_value_heads), scores)
    spec = f"kvzip:level=head,head_scores={scores}"
    text = "the garden of the old house was quiet and nobody came " * 3
    context = kvfold.compress(small, tokenizer, text, spec, 0.5)
    context.save(tmp_path / "house.kvfold")
    scores.unlink()
    again = kvfold.load(tmp_path / "house.kvfold", small, tokenizer)
    assert again.stats().kept == context.stats().kept
    assert again.stats().method == spec
