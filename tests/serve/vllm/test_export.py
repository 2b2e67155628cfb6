# SPDX-License-Identifier: Apache-2.0
"""What vLLM gets of a context, without vLLM: entries, placeholders, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import ContextFileError, KvfoldError
from kvfold.cache.fork import fork
from kvfold.contexts.files.format import opened, read_header
from kvfold.serve.vllm.export import EntryCounts, Paged, UnevenContext, pages
from kvfold.serve.vllm.head_pages.layout import HeadPages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedContext, ServedFolder
from tests.helpers.contexts import DOCUMENT, KIVI, forged, new_model
from tests.helpers.vllm import BLOCK, ROPES, filled, header_keeping


def logits(model: Any, cache: Any, first: int, ids: Tensor) -> Tensor:
    """Of tokens that follow what `cache` holds, numbered from `first` on."""
    places = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        out: Tensor = model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits
    return out


QUESTION_IDS = torch.tensor([[5, 3, 7, 4, 9, 6, 10, 8, 3]])


def assert_served_alike(
    model: Any, tokenizer: Any, path: Path, method: str, budget: Any, moves: bool = True
) -> None:
    """A question numbered from M on finds what one numbered from N on finds in the context."""
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, budget)
    context.save(path)
    own = logits(model, fork(context.cache), context.ids.shape[1], QUESTION_IDS)
    cache = filled(path, MetaModel(model.config, None))
    count = cache.get_seq_length()
    assert count == min(read_header(path).layers[0].kept)
    served = logits(model, cache, count, QUESTION_IDS)
    error, spread = (own - served).abs().max(), own.max() - own.min()
    assert error < 2e-4 * spread
    if moves:
        # The keys as they were made would not do.
        plain = filled(path, Unmoved(model.config, None))
        assert (logits(model, plain, count, QUESTION_IDS) - own).abs().max() > 0.02 * spread


class Unmoved(MetaModel):
    def move(self, layer: int, keys: Tensor, by: int) -> Tensor:
        return keys.float()


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
def test_moved_keys_find_what_the_context_finds(tokenizer, tmp_path, rope):
    model = new_model(rope_parameters=ROPES[rope])
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", "snapkv", 40)


@pytest.mark.parametrize(
    "family",
    ["mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "glm4", "gpt_neox", "smollm3"],
)
def test_models_rotate_in_their_own_way(tokenizer, tmp_path, family):
    assert_served_alike(new_model(family), tokenizer, tmp_path / "a.kvfold", "snapkv", 40)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scissorhands_kvcf", "snapkv + every:interval=16"])
def test_query_windows_beside_the_entries_are_left_out(model, tokenizer, tmp_path, method):
    kvfold.compress(model, tokenizer, DOCUMENT, method, 40).save(tmp_path / "a.kvfold")
    assert all("window_queries" in x.by_head for x in read_header(tmp_path / "a.kvfold").layers)
    assert filled(tmp_path / "a.kvfold", MetaModel(model.config, None)).get_seq_length()


@pytest.mark.parametrize("method", ["h2o", "streaming_llm", "kvzip:level=uniform", "tova", "finch"])
def test_methods_that_keep_equally_many(model, tokenizer, tmp_path, method):
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", method, 40)


def test_what_was_read_after_the_compression_goes_over_too(model, tokenizer, tmp_path, meta_model):
    for spec in ("knorm", "kvzip:level=uniform", "h2o"):  # the last one leaves holes
        context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 40)
        step = torch.tensor([[7]])
        with torch.no_grad():
            for _ in range(3):
                model(step, past_key_values=context.cache, use_cache=True)
        ids = torch.cat([context.ids, step, step, step], 1)
        context = dataclasses.replace(context, ids=ids)
        path = tmp_path / "a.kvfold"
        context.save(path)
        own = logits(model, fork(context.cache), ids.shape[1], QUESTION_IDS)
        cache = filled(path, meta_model)
        count = cache.get_seq_length()
        served = logits(model, cache, count, QUESTION_IDS)
        assert (own - served).abs().max() < 2e-4 * (own.max() - own.min())
        with opened(path) as file:
            counts = EntryCounts.of(file.header, None)
            assert ServedContext.of("a", file, counts).tokens[-3:] == [7, 7, 7]


def test_a_context_that_keeps_everything_is_not_moved(model, tokenizer, tmp_path):
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", "full", None, moves=False)


@pytest.mark.slow
def test_half_precision_keys_are_rotated_in_float32(tokenizer, tmp_path):
    model = new_model(dtype=torch.bfloat16)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    meta_model = MetaModel(model.config, None)
    with opened(tmp_path / "a.kvfold") as file:
        page = next(pages(file, meta_model, slice(None), EntryCounts.of(file.header, None)))
    stored = context.cache.states[0].stored().keys[0].float()
    exact = rotated(stored, 40 - context.ids.shape[1])
    assert page.keys.dtype == torch.float32
    assert (page.keys.transpose(0, 1) - exact).abs().max() < 1e-5 * exact.abs().max()


def rotated(keys: Tensor, by: int) -> Tensor:
    """Keys `[…, 8]` moved by so many positions, in float64."""
    angles = by * 1e4 ** (-torch.arange(0, 8, 2).double() / 8)
    cos, sin = (torch.cat([f(angles)] * 2) for f in (torch.cos, torch.sin))
    first, second = keys.double().chunk(2, -1)
    return keys.double() * cos + torch.cat([-second, first], -1) * sin


def test_a_rank_reads_its_own_heads(served_folder, meta_model):
    whole = filled(served_folder.path("even"), meta_model)
    for head in range(2):
        part = filled(served_folder.path("even"), meta_model, slice(head, head + 1))
        for mine, every in zip(part.layers, whole.layers, strict=True):
            assert torch.equal(mine.keys[0, 0], every.keys[0, head])
            assert torch.equal(mine.values[0, 0], every.values[0, head])


# --- heads that keep different numbers -----------------------------------------------------------


@pytest.mark.parametrize("heads", [slice(None), slice(0, 1), slice(1, 2)], ids=str)
def test_pages_hold_what_each_head_keeps(model, tokenizer, served_folder, meta_model, heads):
    """Beside keys and values of the whole text, moved in float64."""
    path = served_folder.path("uneven")
    context = kvfold.load(path, model, tokenizer)
    with torch.no_grad():
        text = model(context.ids, use_cache=True).past_key_values
    seen = context.ids.shape[1]
    rest = seen % BLOCK
    with opened(path) as file:
        counts = EntryCounts.of(file.header, Paged(BLOCK))
        found = list(pages(file, meta_model, heads, counts))
    assert rest and len(found) == 8 and counts.rest == rest
    different = set()
    for index, (own, last) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert own.layer == last.layer == index and last.of_heads is None
        kept = [row.tolist() for row in context.cache.positions(index)[0]][heads]
        assert all(row[-rest:] == list(range(seen - rest, seen)) for row in kept)
        assert own.of_heads == tuple((len(row) - rest) // BLOCK for row in kept)
        layer = text.layers[index]
        whole = [layer.keys[0, heads], layer.values[0, heads]]
        keys, values = (
            torch.cat([part[head, row[:-rest]] for head, row in enumerate(kept)]) for part in whole
        )
        exact = rotated(keys, counts.count - seen)
        assert (own.keys[:, 0] - exact).abs().max() < 1e-5 * exact.abs().max()
        assert torch.allclose(own.values[:, 0], values, atol=1e-5)
        exact = rotated(whole[0][:, -rest:], counts.count - seen).transpose(0, 1)
        assert (last.keys - exact).abs().max() < 1e-5 * exact.abs().max()
        assert torch.allclose(last.values, whole[1][:, -rest:].transpose(0, 1), atol=1e-5)
        different.add(own.of_heads)
    assert len(different) > 1 and counts.count < seen


def test_heads_that_do_not_all_keep_the_last_tokens_are_refused(model, tokenizer, tmp_path):
    """Their numbers of entries are those of whole pages and a rest."""
    method = f"kvzip + pages:size={BLOCK}"
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, 60)
    path, seen = tmp_path / "a.kvfold", context.ids.shape[1]
    context.save(path)
    assert ServedFolder(tmp_path, Paged(BLOCK)).get("a").pages is not None
    with opened(path) as file:
        columns = file.tensor("layers.1.columns.0")
    assert int(columns[-1]) == seen - 1
    left = next(place for place in range(seen) if place not in columns)
    columns[-1] = left  # another token in the place of the last one
    forged(path, path, "layers.1.columns.0", columns)
    rest = seen % BLOCK
    said = f"heads do not all keep the last {rest} tokens, which fill no page of {BLOCK}: kvfold"
    with pytest.raises(UnevenContext, match=said) as refusal:
        ServedFolder(tmp_path, Paged(BLOCK)).get("a")
    assert f"--pages {BLOCK}" in str(refusal.value)


def test_equal_counts_are_served_as_they_are_with_and_without_pages(served_folder):
    for paged in (None, Paged(BLOCK)):
        for kept in ([40, 40], [1, 1]):
            header = header_keeping(served_folder, 151, kept, kept)
            assert EntryCounts.of(header, paged) == EntryCounts(kept[0])


def test_whole_pages_of_all_layers_take_blocks_together(served_folder):
    header = header_keeping(served_folder, 151, [7 + 16, 7 + 64], [7, 7 + 32])
    pages_of = HeadPages(((1, 4), (0, 2)))
    # Seven pages are two blocks of four; six of one head, on its own rank, three of two.
    assert EntryCounts.of(header, Paged(16)) == EntryCounts(2 * 16 + 7, pages_of, 7)
    assert EntryCounts.of(header, Paged(16, 2)) == EntryCounts(3 * 16 + 7, pages_of, 7)
    header = header_keeping(served_folder, 160, [16, 64])
    assert EntryCounts.of(header, Paged(16)) == EntryCounts(3 * 16, HeadPages(((1, 4),)), 0)


@pytest.mark.parametrize("kept", [[7 + 16, 7 + 63], [16, 64], [6, 7 + 16], [0, 7]], ids=str)
def test_entries_that_do_not_fill_pages_are_refused(served_folder, kept):
    header = header_keeping(served_folder, 151, [7 + 16, 7 + 16], kept)
    with pytest.raises(UnevenContext, match="which do not fill pages of 16") as refusal:
        EntryCounts.of(header, Paged(16))
    assert refusal.value.size == 16
    low, high = min(23, *kept), max(23, *kept)
    assert f"heads keep {low} to {high} entries" in str(refusal.value)
    with pytest.raises(UnevenContext, match="this vLLM holds as many of each head") as refusal:
        EntryCounts.of(header, None)
    assert refusal.value.size is None


@pytest.mark.parametrize(
    "paged, asked, end", [(None, "--level mass", "mass"), (Paged(BLOCK), f"--pages {BLOCK}", "16")]
)
def test_uneven_files_are_refused_with_the_command_that_helps(
    model, tokenizer, tmp_path, paged, asked, end
):
    kvfold.compress(model, tokenizer, DOCUMENT, "pyramidkv", 40).save(tmp_path / "a.kvfold")
    with pytest.raises(UnevenContext) as refusal:
        ServedFolder(tmp_path, paged).get("a")
    command = f"kvfold compress MODEL {tmp_path}/a.kvfold {asked} --out {tmp_path}/a-{end}.kvfold"
    assert str(refusal.value).endswith(f": {command}")


@pytest.mark.parametrize("method", [KIVI, "think", "minicache"])
def test_encoded_entries_are_refused(model, tokenizer, tmp_path, method):
    kvfold.compress(model, tokenizer, DOCUMENT, method).save(tmp_path / "a.kvfold")
    with pytest.raises(KvfoldError, match="stores entries encoded"):
        ServedFolder(tmp_path).get("a")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["kvzip", "snapkv + adakv", "pyramidkv"])
@pytest.mark.parametrize("rule", ["mass", "votes", "union"])
def test_levelled_heads_are_served_as_the_levelled_context(
    model, tokenizer, tmp_path, meta_model, method, rule
):
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, 40).levelled(rule)
    context.save(tmp_path / "a.kvfold")
    served = ServedFolder(tmp_path).get("a")
    assert served.kept == context.level.tokens and served.pages is None
    chosen = context.cache.positions(0)[0][0]
    assert served.tokens == context.ids[0, chosen].tolist()
    own = logits(model, fork(context.cache), context.ids.shape[1], QUESTION_IDS)
    cache = filled(tmp_path / "a.kvfold", meta_model)
    got = logits(model, cache, served.kept, QUESTION_IDS)
    assert (own - got).abs().max() < 2e-4 * (own.max() - own.min())


@pytest.mark.parametrize(
    "method",
    ["kvzip:level=uniform + match:bias=none,target=block", "snapkv + match:bias=none,target=block"],
)
def test_fitted_values_without_biases_go_over(model, tokenizer, tmp_path, method):
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", method, 40)
    kvfold.compress(model, tokenizer, DOCUMENT, "kvzip:level=uniform + match", 40).save(
        tmp_path / "biased.kvfold"
    )
    with pytest.raises(KvfoldError, match="gives entries an attention bias"):
        ServedFolder(tmp_path).get("biased")


def test_coded_entries_are_decoded_without_the_models_weights(
    model, tokenizer, tmp_path, folder, meta_model
):
    basis = tmp_path / "basis.safetensors"
    kvfold.fit_codec(model, tokenizer, [DOCUMENT, DOCUMENT[::-1], DOCUMENT * 2], basis)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 60)
    context.save(tmp_path / "a.kvfold", codec=f"kvtc:file={basis},ratio=2,window=8")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    own = logits(model, fork(loaded.cache), loaded.ids.shape[1], QUESTION_IDS)
    exact = logits(model, fork(context.cache), context.ids.shape[1], QUESTION_IDS)
    cache = filled(tmp_path / "a.kvfold", meta_model)
    got = logits(model, cache, cache.get_seq_length(), QUESTION_IDS)
    spread = own.max() - own.min()
    assert (own - got).abs().max() < 2e-4 * spread < (own - exact).abs().max()
    served_folder = ServedFolder(tmp_path)
    check = CompatibilityCheck(served_folder, meta_model, "float32")
    check.check(served_folder.get("a"))
    basis.unlink()
    check = CompatibilityCheck(served_folder, meta_model, "float32")
    with pytest.raises(ContextFileError, match="which is not there: put a copy of it beside"):
        check.check(served_folder.get("a"))


@pytest.mark.parametrize("codec", ["zstd", "kivi4"])
def test_entries_of_codecs_without_a_basis_go_over(model, tokenizer, tmp_path, meta_model, codec):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 60)
    context.save(tmp_path / "a.kvfold", codec=codec)
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    own = logits(model, fork(loaded.cache), loaded.ids.shape[1], QUESTION_IDS)
    cache = filled(tmp_path / "a.kvfold", meta_model)
    got = logits(model, cache, cache.get_seq_length(), QUESTION_IDS)
    assert (own - got).abs().max() < 2e-4 * (own.max() - own.min())
