# SPDX-License-Identifier: Apache-2.0
"""KVzip: what repeating the document keeps, by hand; its budget, and head scores from a file."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold import CompressedCache, KvfoldError, parse
from kvfold.bundled import FOLDER
from kvfold.generation.reading import read_on
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.stages.score.repetition import INSTRUCTION, PROMPTS
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    HEADS,
    LAYERS,
    ByHand,
    assert_holds,
    evict,
    model_with,
)
from tests.helpers.kvzip_by_hand import kept_by_score, most_attention


def test_kvzip_asks_as_the_released_code_does():
    how = parse("kvzip:chunk=100").stages().needs.get(ContextReconstruction)
    assert (how.chunk, how.first, how.later, how.previous) == (100, *PROMPTS)
    assert how.first == "\n\nRepeat the previous context exactly."
    assert how.later.endswith("starting with ") and how.previous == 8
    assert parse("kvzip").stages().needs.get(ContextReconstruction).chunk == 2000


@pytest.mark.parametrize(
    ("options", "missing"), [("", 0), ("strict=true", 1), ("level=uniform", 0), ("level=head", 0)]
)
def test_kvzip_spends_its_budget_over_all_layers_and_heads(options, missing):
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    context = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 20)
    # What opens the chat is kept beside the budget.
    opening = len(token_ids(tokenizer, PromptFrame.of(tokenizer).before)[0])
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


@pytest.mark.slow
def test_kvzip_floor_leaves_no_head_empty():
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    counts = {}
    for options in ("floor=0.0", "floor=0.25", "floor=0.25,score=rms"):
        context = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 20)
        opening = len(token_ids(tokenizer, PromptFrame.of(tokenizer).before)[0])
        counts[options] = torch.tensor(context.stats().kept)[:, 0] - opening
        assert counts[options].sum() == counts[options].numel() * 20
    assert counts["floor=0.0"].min() < 5 == counts["floor=0.25"].min()
    assert not torch.equal(counts["floor=0.25"], counts["floor=0.25,score=rms"])


@pytest.mark.slow
def test_kvzip_strict_spends_what_the_released_threshold_leaves():
    """Which is int(r·N) − 1 of all N pairs, and not r of each head's, rounded down."""
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = len(token_ids(tokenizer, PromptFrame.of(tokenizer).before)[0])
    kept = {}
    for options in ("strict=true", "strict=false"):
        stats = kvfold.compress(small, tokenizer, text, f"kvzip:{options}", 0.29).stats()
        counts = torch.tensor(stats.kept)[:, 0] - opening
        kept[options], tokens = int(counts.sum()), stats.seen - opening
    heads = counts.numel()
    assert int(0.29 * tokens) * heads < int(0.29 * tokens * heads) - 1
    assert kept["strict=true"] == int(0.29 * tokens * heads) - 1
    assert kept["strict=false"] == int(0.29 * tokens) * heads


@pytest.mark.parametrize("spec", ["kvzip", "kvzip:instruction=true"])
def test_kvzip_keeps_an_opening_whose_last_token_merges_with_the_document(spec):
    """As of templates that end in a space, which most tokenizers put before a word."""
    small, tokenizer = kvfold.bundled_model()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>\n[INST] {{ m['content'] }} [/INST]{% endfor %}"
    )
    frame = PromptFrame.of(tokenizer)
    opening = token_ids(tokenizer, frame.before)[0].tolist()
    text = "the garden of the old house was quiet and nobody came " * 5
    context = kvfold.compress(small, tokenizer, text, spec, 20)
    ids = context.ids[0].tolist()
    if spec == "kvzip":
        assert ids[: len(opening)] != opening and ids[: len(opening) - 1] == opening[:-1]
    (protected,) = context.stats().protected
    told = INSTRUCTION if "instruction" in spec else ""
    begun = tokenizer.decode(ids[:protected])
    assert (frame.before + told).startswith(begun)
    assert protected >= len(token_ids(tokenizer, frame.before + told)[0]) - 1
    for layer in range(small.config.num_hidden_layers):
        for head in context.cache.positions(layer)[0]:
            assert {*range(protected)} <= {*head.tolist()}


@pytest.mark.slow
def test_kvzip_may_put_the_released_instruction_before_the_document():
    small, tokenizer = kvfold.bundled_model()
    text = "the garden of the old house was quiet and nobody came " * 5
    opening = PromptFrame.of(tokenizer).before
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


@pytest.mark.slow
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


@pytest.mark.slow
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


CHUNK = 24
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text, add_special_tokens=False).input_ids)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@cache
def chat_frame() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the chat template puts before a message and after it."""
    message = [{"role": "user", "content": "WORDS"}]
    text = tokenizer().apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after = text.split("WORDS")
    return ids_of(before), ids_of(after)


@cache
def kvzip_scores(
    heads: int, ids: tuple[int, ...], prefix: int, plus: bool = False
) -> list[list[list[float]]]:
    """Of each layer, KV head and token after the prefix: the most attention while repeating."""
    model = model_with(heads, "truth", vocab_size=len(tokenizer()))
    attentions = [layer.self_attn for layer in model.model.layers]
    inputs: dict[Any, torch.Tensor] = {}
    hooks = [
        attention.register_forward_pre_hook(
            lambda module, _, given: inputs.update({module: given["hidden_states"][0]}),
            with_kwargs=True,
        )
        for attention in attentions
    ]
    text, postfix = ids[prefix:], chat_frame()[1]
    scores: list[list[list[float]]] = [[[] for _ in range(heads)] for _ in range(LAYERS)]
    for start in range(0, len(text), CHUNK):
        part = text[start : start + CHUNK]
        request = ids_of(FIRST)
        if start > 0:
            request = (*ids_of(LATER), *text[start - 8 : start])
        new = (*request, *postfix, *part)
        one = ByHand(model)(torch.tensor([ids + new]))
        scored = range(prefix + start, prefix + start + len(part))
        for layer, attention, of_layer in zip(one.layers, attentions, scores, strict=True):
            weights = (inputs[attention], attention.o_proj.weight) if plus else ()
            for h, of_head in enumerate(of_layer):
                of_head += most_attention(layer, h, prefix, scored, len(new), *weights)
    for hook in hooks:
        hook.remove()
    return scores


def some_marks(count: int) -> tuple[int, ...]:
    """Spaces behind full stops and line breaks, again and again."""
    return (ids_of(".\n") * count)[:count]


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(40, len(tokenizer()), (count,), generator=generator).tolist())


@pytest.mark.cases(2)
@pytest.mark.slow
@HEADS
@pytest.mark.parametrize(
    "options", ["", "strict=true", "level=uniform", "level=head", "normalize=true", "demote=0.05"]
)
def test_kvzip_keeps_what_repeating_the_text_looks_at(options, heads):
    """A chat of 70 tokens and a bare text of 53; the first's last part is a short one."""
    check_kept(options, heads)


@pytest.mark.slow
def test_kvzip_plus_keeps_what_outweighs_the_rest_after_the_projection():
    assert parse("kvzip_plus") == parse("kvzip:normalize=true")
    plain, plus = (check_kept(options, 2, chunked) for options, chunked in SINGLE)
    assert plain != plus


SINGLE = (("", 100), ("normalize=true", 30))  # a prompt read at once, and one read in pieces


def check_kept(options: str, heads: int, prefill_chunk: int = 100) -> list[list[list[list[int]]]]:
    """Compares kept entries with the loops' after a prefill in pieces; gives them back."""
    size = len(tokenizer())
    model, truth = (model_with(heads, role, vocab_size=size) for role in ("kvfold", "truth"))
    opening = chat_frame()[0]
    # The last token is read with the answer.
    texts = [opening + some_ids(70 - len(opening), 1), some_ids(53, 2)]
    if options.startswith("demote"):
        texts = [text[:45] + some_marks(20) + text[65:] for text in texts]
    cache = kvfold.CompressedCache(
        model, f"kvzip:{options or 'level=pair'},chunk={CHUNK}", SMALL, tokenizer=tokenizer()
    )
    ids = torch.tensor([texts[0], (0,) * (70 - len(texts[1])) + texts[1]])
    mask = torch.tensor([[1] * 70, [0] * (70 - len(texts[1])) + [1] * len(texts[1])])
    sampling = {"max_new_tokens": 1, "do_sample": False, "prefill_chunk": prefill_chunk}
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, **sampling)
    expected, kept_in_rows = [], []
    for text, prefix in zip(texts, (len(opening), 0), strict=True):
        scores = kvzip_scores(heads, text[:-1], prefix, options == "normalize=true")
        if options.startswith("demote"):
            marks = set(some_marks(20))
            factors = [0.05 if token in marks else 1.0 for token in text[prefix:-1]]
            plain = kept_by_score(scores, SMALL, prefix)
            scores = [
                [[f * s for f, s in zip(factors, of_head, strict=True)] for of_head in of_layer]
                for of_layer in scores
            ]
            assert kept_by_score(scores, SMALL, prefix) != plain
        kept = kept_by_score(scores, SMALL, prefix, options)
        kept_in_rows.append(kept)
        one = ByHand(truth)(torch.tensor([text[:-1]]))
        expected.append(evict(one, lambda _, kept=kept: kept)(torch.tensor([text[-1:]])))
    assert_holds(cache, expected)
    return kept_in_rows


@pytest.mark.slow
@HEADS
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_kvzip_keeps_heads_by_scores_from_a_file_and_repeats_nothing(heads, suffix, tmp_path):
    size = len(tokenizer())
    model, truth = (model_with(heads, role, vocab_size=size) for role in ("kvfold", "truth"))
    opening = chat_frame()[0]
    texts = [opening + some_ids(70 - len(opening), 1), some_ids(53, 2)]
    scores = torch.rand(LAYERS, heads, generator=torch.Generator().manual_seed(3))
    file = str(tmp_path / f"heads{suffix}")
    if suffix == ".pt":
        torch.save(scores[:, None], file)
    else:
        save_file({"head_scores": scores}, file)
    cache = kvfold.CompressedCache(
        model, f"kvzip:level=head,head_scores={file}", 0.5, tokenizer=tokenizer()
    )
    ids = torch.tensor([texts[0], (0,) * 17 + texts[1]])
    mask = torch.tensor([[1] * 70, [0] * 17 + [1] * 53])
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=30, **options)
    hook.remove()
    assert lengths == [30, 30, 9, 1]
    expected = []
    for text, prefix in zip(texts, (len(opening), 0), strict=True):
        tokens = len(text) - 1 - prefix
        per_token = [[[score] * tokens for score in layer] for layer in scores.tolist()]
        kept = kept_by_score(per_token, int(tokens * 0.5), prefix, "level=head")
        one = ByHand(truth)(torch.tensor([text[:-1]]))
        expected.append(evict(one, lambda _, kept=kept: kept)(torch.tensor([text[-1:]])))
    assert_holds(cache, expected)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("padded", "encoding"), [(False, "utf-8"), (True, "utf-8-sig")])
def test_kvzip_scores_by_the_attention_of_given_questions(tmp_path, padded, encoding):
    """The stock model's own attention weights, question by question: their maximum."""
    small, tokenizer = kvfold.bundled_model()
    eager = AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=small.dtype, attn_implementation="eager"
    )
    frame, file = PromptFrame.of(tokenizer), tmp_path / "questions.txt"
    asked = ["Where is the old house?", "Who came into the garden?"]
    file.write_text("\n".join([asked[0], "", f"  {asked[1]} "]), encoding=encoding)
    texts = ["the garden of the old house was quiet " * 4, "nobody came to the old house " * 3]
    rows = [token_ids(tokenizer, frame.before, text) for text in texts[: 1 + padded]]
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([F.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(row * 0 + 1, (longest - row.shape[1], 0)) for row in rows])
    cache = CompressedCache(small, f"kvzip:questions={file}", 10, tokenizer=tokenizer)
    with cache.reading():
        read_on(small, cache, ids, mask, longest)
        scores = [state.observers[ContextReconstruction].scores for state in cache.states]
    for row, own in enumerate(rows):
        most = []
        for question in asked:
            new = token_ids(tokenizer, frame.separator, question, frame.after)
            seen = eager(torch.cat([own, new], 1), output_attentions=True).attentions
            most.append([each[0, :, -new.shape[1] :, : own.shape[1]].amax(1) for each in seen])
        for layer, (found, *each) in enumerate(zip(scores, *most, strict=True)):
            of_query_heads = torch.stack(each).amax(0)
            expected = of_query_heads.unflatten(0, (found.shape[1], -1)).amax(1)
            opening = len(token_ids(tokenizer, frame.before)[0])
            mine = found[row, :, -own.shape[1] :]
            assert torch.allclose(mine[:, opening:], expected[:, opening:], atol=1e-5), layer


@pytest.mark.slow
def test_match_is_fitted_to_given_questions(tmp_path):
    small, tokenizer = kvfold.bundled_model()
    file = tmp_path / "questions.txt"
    file.write_text("Where is the old house?\nWho came into the garden?\n", encoding="utf-8")
    text = "the garden of the old house was quiet and nobody came " * 5
    method = f"kvzip:questions={file},level=uniform + match"
    cache = CompressedCache(small, method, 20, tokenizer=tokenizer)
    frame = PromptFrame.of(tokenizer)
    ids = token_ids(tokenizer, frame.before, text)
    with cache.reading():
        read_on(small, cache, ids, None, ids.shape[1])
        counts = [
            each.queries.shape[2] for each in cache.states[0].observers[ReferencesNeed].repeated
        ]
    groups = small.config.num_attention_heads // small.config.num_key_value_heads
    asked = [
        token_ids(tokenizer, frame.separator, line, frame.after).shape[1]
        for line in file.read_text().splitlines()
    ]
    assert counts == [groups * tokens for tokens in asked]
    assert any(now < before for before, now, *_ in cache.stats().refits)


@pytest.mark.parametrize(
    ("name", "held"), [("absent.txt", None), ("empty.txt", b" \n"), ("bytes.txt", b"\xff")]
)
def test_kvzip_questions_that_are_none_are_refused(tmp_path, name, held):
    small, tokenizer = kvfold.bundled_model()
    if held is not None:
        (tmp_path / name).write_bytes(held)
    spec = f"kvzip:questions={tmp_path / name}"
    with pytest.raises(KvfoldError, match=f"{name} (as|has no) question"):
        kvfold.compress(small, tokenizer, "the old house was quiet", spec, 0.5)
    with pytest.raises(KvfoldError, match="head_scores are taken as they are, without questions"):
        parse("kvzip:level=head,head_scores=a.pt,questions=b.txt")


def test_a_text_of_no_token_says_so():
    small, tokenizer = kvfold.bundled_model()
    with pytest.raises(KvfoldError, match="there is no text to compress"):
        kvfold.compress(small, tokenizer, "", "kvzip", 0.5)


def test_a_first_prompt_without_its_forwards_is_refused_and_later_ones_are_read():
    small, tokenizer = kvfold.bundled_model()
    cache, ids = CompressedCache(small, "kvzip", 20, tokenizer=tokenizer), torch.full((1, 40), 7)
    with torch.no_grad():
        with pytest.raises(KvfoldError, match="runs forwards of its own over a first prompt"):
            small(ids, past_key_values=cache)
        context = kvfold.compress(small, tokenizer, "the garden was quiet " * 20, "kvzip", 20)
        before = context.cache.get_seq_length()
        small(ids, past_key_values=context.cache)
    assert context.cache.get_seq_length() == before + 40
