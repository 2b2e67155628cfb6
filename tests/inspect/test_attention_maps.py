# SPDX-License-Identifier: Apache-2.0
"""What `kvfold inspect` measures against dense attention, what it keeps, and its page."""

from __future__ import annotations

import base64
import copy
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

import kvfold
from kvfold.cli import app
from kvfold.cli.inspect import PAGE, PICTURES
from kvfold.inspect import pictures
from kvfold.inspect.attention_maps import (
    CELLS,
    MOST,
    SINKS,
    THRESHOLDS,
    LayerAttention,
    lazy_window,
    watch_attention,
)
from kvfold.inspect.downsample import cuts, means
from kvfold.inspect.inspected_text import InspectedText, NeedleSpan
from kvfold.inspect.page import contents, folded, page
from kvfold.inspect.retention import Retention, heads_per_token, measure_retention
from kvfold.methods.stages.allocate.density import by_density
from tests.helpers.models import VOCABULARY, build

TOKENS = 300
HOSTILE = (
    "A </script><script>alert(1)</script> <b>bold</b> <!-- {{data}} & \u2028 naïve 日本 🙂 end."
)


def ids(tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(3))


def dense(model: PreTrainedModel, input_ids: Tensor) -> list[Tensor]:
    """Each layer's attention `[Hq, N, N]`, by the model file's own eager attention."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return [a[0] for a in eager(input_ids, output_attentions=True).attentions]


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return kvfold.bundled_model()


@pytest.fixture(scope="module")
def looked_at(
    bundled: tuple[Any, Any],
) -> tuple[InspectedText, list[LayerAttention], list[Retention]]:
    model, tokenizer = bundled
    document = InspectedText.with_needles(tokenizer, 400, seed=1)
    retentions = [
        measure_retention(model, tokenizer, document, method, kvfold.Budget.ratio(0.3))
        for method in ("pyramidkv", "adakv")
    ]
    return document, watch_attention(model, document.ids), retentions


# --- what is measured ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3"])
def test_statistics_are_those_of_dense_attention(family: str) -> None:
    model, input_ids = build(family), ids()
    truth = dense(model, input_ids)
    found = watch_attention(model, input_ids)
    assert found
    if family in ("gpt_oss", "gemma2"):  # every other layer slides, and is left out
        assert [layer.index for layer in found] == [1, 3]
    for layer in found:
        attention = truth[layer.index].double()
        close = {"rtol": 2e-4, "atol": 2e-6}
        heads = attention.shape[0]
        kv_heads = len(layer.holders)
        spans = cuts(TOKENS, CELLS)
        for i, j in [(0, 0), (5, 2), (50, 50), (95, 0), (95, 94), (40, 41)]:
            rows, columns = slice(spans[i], spans[i + 1]), slice(spans[j], spans[j + 1])
            mass = attention[:, rows, columns].sum(-1).mean()
            torch.testing.assert_close(layer.cells[i, j].double(), mass, **close)
        entropy = -(attention * attention.clamp(min=1e-300).log()).sum(-1).mean(-1)
        torch.testing.assert_close(layer.entropy.double(), entropy, **close)
        # Of latents, which all heads share, one sum is kept for all of them.
        stored = 1 if family == "deepseek_v3" else kv_heads
        received = attention.sum(1).view(stored, heads // stored, TOKENS).mean(1)
        received = received.repeat_interleave(kv_heads // stored, 0)
        torch.testing.assert_close(layer.variance.double(), received.var(-1), rtol=1e-3, atol=1e-6)
        assert layer.holders.tolist() == [fewest(row.tolist()) for row in received]
        edges = at_edges(attention, lazy_window(TOKENS))
        torch.testing.assert_close(layer.edges.double(), edges, **close)
        assert layer.lazy == pytest.approx(float(edges[-1]), rel=2e-4)
        check_norms(attention[:, -1], layer.kept.tolist())


def fewest(received: list[float]) -> int:
    held, total = 0.0, sum(received)
    for count, value in enumerate(sorted(received, reverse=True), 1):
        held += value
        if held >= MOST * total:
            return count
    raise AssertionError


def at_edges(attention: Tensor, window: int) -> Tensor:
    mass = []
    for query in range(attention.shape[1]):
        inside = [j for j in range(query + 1) if j < SINKS or query - j < window]
        mass.append(attention[:, query, inside].sum(-1).mean())
    return torch.stack(mass)


def check_norms(row: Tensor, kept: list[int]) -> None:
    """`kept` entries lose at most each threshold of the norm, and one entry less loses more."""

    def loss(count: int) -> float:
        candidates = row[:, SINKS:]
        left = candidates[:, TOKENS - count :] if count > SINKS else candidates[:, :0]
        base = candidates.norm(dim=-1).mean()
        return float((base - left.norm(dim=-1).mean()) / base)

    assert len(set(kept)) > 4
    for threshold, count in zip(THRESHOLDS, kept, strict=True):
        assert loss(count) <= threshold * (1 + 1e-3)
        assert count == SINKS + 1 or loss(count - 1) > threshold * (1 - 1e-3)


def test_rows_of_cells_are_all_of_a_query_s_attention() -> None:
    layers = watch_attention(build("llama"), ids())
    for layer in layers:
        assert layer.cells.shape == (CELLS, CELLS)
        torch.testing.assert_close(layer.cells.sum(-1), torch.ones(CELLS), rtol=1e-4, atol=1e-4)
        assert torch.equal(layer.cells, layer.cells.tril())
        assert bool((layer.edges[: lazy_window(TOKENS)] > 0.999).all())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


@pytest.mark.slow
def test_no_matrix_of_all_queries_and_entries_is_made() -> None:
    tokens = 1500
    with Largest() as largest:
        watch_attention(build("llama"), ids(tokens))
    assert 0 < largest.elements < tokens * tokens / 2


def test_a_text_shorter_than_the_grid_has_a_cell_for_every_token() -> None:
    layers = watch_attention(build("llama"), ids(7))
    assert layers[0].cells.shape == (7, 7)
    torch.testing.assert_close(layers[0].cells, dense(build("llama"), ids(7))[0].mean(0))


def test_watching_tells_of_each_layer_and_leaves_the_model_as_it_was() -> None:
    model, seen = build("llama"), []
    before = model(ids()).logits
    watch_attention(model, ids(), lambda: seen.append(1))
    assert len(seen) == 4
    torch.testing.assert_close(model(ids()).logits, before, rtol=0, atol=0)


def test_spans_are_even_and_their_means_are_the_whole_s() -> None:
    assert cuts(5, 96) == [0, 1, 2, 3, 4, 5]
    assert [b - a for a, b in zip(cuts(10, 4), cuts(10, 4)[1:], strict=False)] == [2, 3, 2, 3]
    assert means(torch.arange(10.0), 4).tolist() == [0.5, 3.0, 5.5, 8.0]


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pyramidkv", "adakv", "kvzip", "d2o", "dbudgetkv"])
def test_holdings_are_the_positions_of_the_cache(bundled: tuple[Any, Any], method: str) -> None:
    model, tokenizer = bundled
    document = InspectedText.with_needles(tokenizer, 400, seed=2)
    found = measure_retention(model, tokenizer, document, method, kvfold.Budget.ratio(0.3))
    limit = None if method == "dbudgetkv" else 0.3
    context = kvfold.compress(
        model, tokenizer, document.text, method, limit, special_tokens=document.special_tokens
    )
    assert torch.equal(context.ids, document.ids)
    expected = torch.zeros_like(found.counts)
    for layer in range(4):
        for head in context.cache.positions(layer)[0]:
            for position in head.tolist():
                expected[layer, position] += 1
    assert torch.equal(found.counts, expected)
    assert found.heads == (4, 4, 4, 4)
    assert found.kept == pytest.approx(context.stats().kept_fraction)
    assert found.nbytes == context.stats().nbytes


def test_what_needles_keep_is_counted_over_their_entries() -> None:
    layers = [[[torch.tensor([0, 1, 5]), torch.tensor([], dtype=torch.long)]]] * 2
    counts = heads_per_token(layers, 6)
    assert counts.tolist() == [[1, 1, 0, 0, 0, 1]] * 2
    retention = Retention("m", "b", counts, (2, 2), 1, 2)
    assert retention.kept_of([NeedleSpan(0, 2, True), NeedleSpan(4, 6, False)]) == 6 / 16
    assert retention.shares[0].tolist() == [0.5, 0.5, 0, 0, 0, 0.5]


# --- the document -------------------------------------------------------------------------------


def test_tokens_joined_are_the_text(bundled: tuple[Any, Any]) -> None:
    document = InspectedText.of(bundled[1], HOSTILE)
    assert len(document.pieces) == document.ids.shape[1]
    assert "".join(document.pieces).endswith(HOSTILE)


def test_needles_are_found_and_one_is_asked_for(bundled: tuple[Any, Any]) -> None:
    document = InspectedText.with_needles(bundled[1], 600, seed=5)
    texts = ["".join(document.pieces[n.start : n.stop]) for n in document.needles]
    assert len(texts) == 6
    assert all(re.fullmatch(r"\s*One of the special .* is: \d+\.\s*", text) for text in texts)
    asked = [text for n, text in zip(document.needles, texts, strict=True) if n.asked]
    key = re.search(r"for (\S+) is", asked[0])
    assert len(asked) == 1 and key is not None
    assert key[1] in document.text.rpartition("\n")[2]


# --- the page -----------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The elements of a page, and what its data script holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data, self._inside = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""


def grid(text: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


def test_the_page_holds_what_was_measured(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    data = json.loads(Tags(page("model", document, layers, retentions)).data)
    tokens = len(document.pieces)
    assert data == json.loads(json.dumps(contents("model", document, layers, retentions)))
    assert tuple(data["pieces"]) == document.pieces
    for shown, retention in zip(data["methods"], retentions, strict=True):
        assert np.array_equal(grid(shown["counts"], (4, tokens)), retention.counts.numpy())
    for shown, layer in zip(data["attention"], layers, strict=True):
        levels = grid(shown["cells"], (CELLS, CELLS)).astype(float)
        cells = layer.cells.numpy()
        assert np.array_equal(levels == 0, cells == 0)
        strong = cells > 1e-5
        decoded = 10 ** (5 * (levels[strong] - 255) / 254)
        assert np.abs(np.log10(decoded / cells[strong])).max() < 5 / 254
        edges = grid(shown["edges"], (min(tokens, 600),)) / 255
        assert np.abs(edges - means(layer.edges, 600).numpy()).max() < 1 / 255


def test_d2o_s_share_is_that_of_its_own_allocation(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    variances = [layer.variance[None] for layer in layers]
    sizes = by_density(variances, torch.tensor([10000]), torch.tensor([10**6]))
    expected = [int(size) / 10000 for size in sizes]
    assert contents("m", document, layers, retentions)["d2o"] == pytest.approx(expected, abs=1e-3)


def test_hostile_text_is_data_and_nothing_is_fetched(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    document = InspectedText.of(tokenizer, HOSTILE * 3)
    retentions = [measure_retention(model, tokenizer, document, "knorm", kvfold.Budget.ratio(0.5))]
    whole = page("<b>m</b></title>", document, watch_attention(model, document.ids), retentions)
    tags = Tags(whole)
    kinds = [tag for tag, _ in tags.found]
    assert kinds.count("script") == 2 and "b" not in kinds
    assert "".join(json.loads(tags.data)["pieces"]).endswith(HOSTILE * 3)
    assert not re.search(r"https?:|//\w+\.|url\(|@import|fetch\(|innerHTML|eval\(", whole)
    loaded = {"src", "href", "action", "onload", "onerror"}
    assert not any(loaded & attributes.keys() for _, attributes in tags.found)
    assert "default-src 'none'" in whole


# --- pictures -----------------------------------------------------------------------------------


def test_pictures_show_what_was_measured(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    heat = pictures.attention_figure(layers)
    panels = [axes for axes in heat.axes if axes.get_title("left").startswith("layer")]
    for panel, layer in zip(panels, layers, strict=True):
        shown = panel.collections[0].get_array()
        assert np.allclose(np.ma.filled(shown, 0.0), layer.cells.numpy())
    lines = pictures.norm_figure(layers).axes[0].lines
    assert lines[1].get_xdata().tolist() == layers[1].kept.tolist()
    mean = pictures.variance_figure(layers).axes[0].lines[-1].get_ydata()
    assert mean == pytest.approx([float(layer.variance.mean()) for layer in layers])
    image = pictures.lazy_figure(layers).axes[0].images[0].get_array()
    assert np.allclose(image[2], layers[2].edges.numpy())
    kept = pictures.kept_maps_figure(document, [0, 1, 2, 3], retentions).axes
    assert [panel.get_title("left") for panel in kept] == ["pyramidkv", "adakv"]
    assert np.allclose(kept[1].images[0].get_array(), retentions[1].shares.numpy())
    assert f"{retentions[1].kept_of(document.needles):.1%}" in kept[1].get_title("right")


def test_layers_beyond_a_row_of_heatmaps_go_on_in_the_next(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    layers = looked_at[1] + looked_at[1][:1]
    panels = [panel for panel in pictures.attention_figure(layers).axes if panel.get_visible()]
    # Five heatmaps, the colour bar and the curves.
    assert [panel.get_title("left") for panel in panels].count("layer 0") == 2
    assert len(panels) == 7


# --- the command --------------------------------------------------------------------------------


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "100"})


@pytest.mark.slow
def test_the_command_writes_a_page_and_pictures_and_never_over_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "sky", "is", "green"], k=120)))
    out = tmp_path / "out"
    arguments = ("--file", str(text), "--methods", "knorm,snapkv:window=8,kernel=3", "--out")
    result = inspect(*arguments, str(out), "--budget", "40")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in out.iterdir()) == sorted([PAGE, *PICTURES])
    assert re.search(r"snapkv:window=8,kernel=3 +\d+\.\d%", result.output)
    assert "index.html" in result.output
    written = (out / PAGE).read_bytes()
    again = inspect(*arguments, str(out))
    assert again.exit_code == 2 and "already holds index.html" in again.stderr
    assert (out / PAGE).read_bytes() == written


def test_without_a_folder_each_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfold.cli.inspect._write", lambda folder, *_: (folder / PAGE).touch())
    for _ in range(2):
        result = inspect("--prompt", "The sky is blue. " * 20, "--methods", "knorm")
        assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kvfold-inspect", "kvfold-inspect-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--file", "b"], "not both"),
        (["--prompt", " "], "the prompt is empty"),
        (["--file", "absent.txt"], "cannot read absent.txt"),
        (["--methods", "snapkw"], "did you mean 'snapkv'?"),
        (["--methods", ","], "no methods"),
        (["--budget", "1.5"], "at most 1.0"),
        (["--budget", "3", "--methods", "snapkv"], "raise it to at least"),
        (["--model", "no/such/model/here"], "cannot load"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = inspect(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_blank_lines_do_not_fill_the_page() -> None:
    pieces = ["a", "\n", "\n\n", " \n", "b\n", "\n", "c"]
    shown = [folded(pieces).get(i, piece) for i, piece in enumerate(pieces)]
    assert shown == ["a", "\n", "\n↵", " ↵", "b\n", "\n", "c"]
    assert folded(["a", "\n\n", "b"]) == {}
