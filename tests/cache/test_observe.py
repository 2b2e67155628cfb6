# SPDX-License-Identifier: Apache-2.0
"""What an Observation offers beyond entries and attention, compared with the model's own data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, HunYuanDenseV1Config
from transformers.pytorch_utils import Conv1D

import kvfold
from kvfold import (
    CompressedCache,
    Forced,
    KvfoldError,
    Method,
    Needs,
    Observation,
    QueryMomentsNeed,
    Stages,
)
from kvfold.cache.fork import end_turn, fork_within
from kvfold.cache.layer import CompressedLayer
from kvfold.errors import IllegalComposition, UnsupportedModel
from kvfold.hf.models import read_tokens
from kvfold.methods.stages.when import Hold
from kvfold.observers.last_queries import LastQueries
from kvfold.observers.stored import KeysBeforeRope, OutputNorms, TokenIds
from tests.helpers.models import build, continuation, prompts
from tests.helpers.registry import registry_restored
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

ALONE, PADDED = (64,), (64, 53, 24)
BUDGET = 20
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3"])
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])


def watching(needs: Needs, **stages: Any) -> tuple[Method, list[Observation]]:
    """A method that keeps other entries in each head, and the observations it was given."""
    seen: list[Observation] = []

    def score(observation: Observation) -> Tensor:
        # The store may overwrite its keys afterwards.
        seen.append(dataclasses.replace(observation, keys=observation.keys.clone()))
        heads = torch.arange(observation.positions.shape[1])[:, None]
        return ((observation.positions * 7 + heads * 5) % 23).float()

    @dataclass(frozen=True)
    class Watching(Method):
        def stages(self) -> Stages:
            return Stages(needs=needs, score=score, **stages)

    return Watching(), seen


def reader_of(model: Any, method: Method, lengths: tuple[int, ...]) -> tuple[Reader, Tensor]:
    """A reader with an empty cache, and a prompt `[B, N]` for it."""
    ids, mask = prompts(lengths)
    cache = CompressedCache(model, method, BUDGET)
    return Reader(model, cache, mask if len(lengths) > 1 else None), ids


def read_in_pieces(reader: Reader, ids: Tensor) -> None:
    """Reads a prompt `[B, N]`, 0 at padding, in pieces of one prefill."""
    with reader.cache.reading(until=ids.shape[1]):
        for end in (24, 48, ids.shape[1]):
            covered = (ids[:, :end] > 0).long()
            mask = None if reader.mask is None else covered
            new = ids[:, reader.cache.get_seq_length() : end]
            read_tokens(reader.model, new, reader.cache, mask)
    reader.started = True


# --- token ids -------------------------------------------------------------------------------


def ids_by_position(ids: Tensor, positions: Tensor) -> Tensor:
    """The tokens of `ids [B, N]`, 0 for padding, at `positions [B, H, T]`, one by one."""
    rows = [row[row > 0].tolist() for row in ids]
    return torch.tensor(
        [
            [[-1 if p < 0 else row[p] for p in head] for head in of_row]
            for row, of_row in zip(rows, positions.tolist(), strict=True)
        ]
    )


def check_ids(seen: list[Observation], ids: Tensor) -> None:
    """Compares all observations since the last check with the tokens `[B, N]` read so far."""
    assert seen
    for observation in seen:
        assert torch.equal(observation[TokenIds], ids_by_position(ids, observation.positions))
    seen.clear()


@BATCHES
@FAMILIES
def test_token_ids_are_those_of_the_entries(family, lengths):
    method, seen = watching(Needs(TokenIds()))
    reader, ids = reader_of(build(family), method, lengths)
    reader(ids)
    check_ids(seen, ids)
    more = continuation(len(ids), 9)
    reader(more[:, :1])
    reader(more[:, 1:])  # a later turn, of which earlier entries are gone
    check_ids(seen, torch.cat([ids, more], 1))


@BATCHES
def test_token_ids_of_a_prompt_in_pieces(lengths):
    method, seen = watching(Needs(TokenIds()))
    reader, ids = reader_of(build("llama"), method, lengths)
    read_in_pieces(reader, ids)
    check_ids(seen, ids)
    more = continuation(len(ids), 9)
    with reader.cache.reading():
        for piece in more.split(4, 1):
            reader(piece)
    check_ids(seen, torch.cat([ids, more], 1))


@pytest.mark.slow
@BATCHES
def test_token_ids_while_decoding(lengths):
    method, seen = watching(Needs(TokenIds(), only_attention=True), when=Hold())
    reader, ids = reader_of(build("llama"), method, lengths)
    reader(ids)
    for token in continuation(len(ids), 4).split(1, 1):
        seen.clear()
        reader(token)
        ids = torch.cat([ids, token], 1)
        check_ids(seen, ids)


def test_token_ids_after_a_crop_and_other_rows():
    method, seen = watching(Needs(TokenIds()))
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    mask, more = reader.mask, continuation(3, 9)
    with reader.cache.frozen():
        reader(more)
        reader.cache.crop(-9)
    reader.cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids, reader.mask = ids[[2, 0, 0]], mask[[2, 0, 0]]
    other = continuation(3, 9, seed=5)
    seen.clear()
    reader(other)
    check_ids(seen, torch.cat([ids, other], 1))


@pytest.mark.slow
def test_token_ids_of_generated_text():
    method, seen = watching(Needs(TokenIds()))
    model, ids = build("llama"), prompts(ALONE)[0]
    cache = CompressedCache(model, method, BUDGET)
    options = {"cache": cache, "max_new_tokens": 5, "do_sample": False}
    said = kvfold.generate(model, ids, prefill_chunk=20, **options)
    check_ids(seen, ids)
    asked = torch.cat([said, continuation(1, 7)], 1)
    kvfold.generate(model, asked, num_beams=2, **options)
    check_ids(seen, asked.repeat(seen[0].positions.shape[0], 1))


def test_token_ids_of_a_fork():
    method, seen = watching(Needs(TokenIds()))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    reader(ids)
    both = torch.cat([ids, continuation(1, 30)], 1)
    seen.clear()
    end_turn(model, fork_within(reader.cache, 8), both)
    check_ids(seen, both)


SEEN: list[Observation] = []


def highest_id(observation: Observation) -> Tensor:
    """The token's id; of one token, the later entry."""
    SEEN.append(observation)
    return observation[TokenIds] * 1000.0 + observation.positions


@dataclass(frozen=True)
class HighestId(Method):
    """Keeps the tokens of highest id."""

    def stages(self) -> Stages:
        return Stages(needs=Needs(TokenIds()), score=highest_id)


def test_a_method_that_reads_token_ids_keeps_what_it_says():
    reader, ids = reader_of(build("llama"), HighestId(), PADDED)
    reader(ids)
    for row, kept in zip(ids.tolist(), reader.cache.positions(1), strict=True):
        best = sorted(range(64), key=lambda column: (row[column], column))[-BUDGET:]
        assert all(head.tolist() == sorted(best) for head in kept)


def test_token_ids_of_a_loaded_context(tmp_path):
    tokenizer, model = word_tokenizer(), build("llama", vocab_size=len(word_tokenizer()))
    with registry_restored():
        kvfold.register("highest_id")(HighestId)
        context = kvfold.compress(model, tokenizer, "sky sea " * 20, HighestId(), BUDGET)
        context.save(tmp_path / "a.kvfold")
        context = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    more = continuation(1, 9).clamp(max=len(tokenizer) - 1)
    SEEN.clear()
    Reader(model, context.cache)(more)
    for observation in SEEN:
        all_ids = torch.cat([context.ids, more], 1)[0]
        expected = all_ids[observation.positions]
        assert torch.equal(observation[TokenIds], expected)


def test_tokens_read_past_the_model_are_unknown():
    method, seen = watching(Needs(TokenIds()))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    with torch.no_grad(), reader.cache.reading():
        reader(ids[:, :40])
        model.get_decoder()(ids[:, 40:], past_key_values=reader.cache)
    for observation in seen:
        expected = ids_by_position(ids, observation.positions)
        expected = expected.masked_fill(observation.positions >= 40, -1)
        assert torch.equal(observation[TokenIds], expected)
    assert seen


def test_embeddings_have_no_token_ids():
    method, seen = watching(Needs(TokenIds()))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad(), pytest.raises(KvfoldError, match="give input_ids"):
        model(inputs_embeds=embedded, past_key_values=reader.cache)
    assert reader.cache.get_seq_length() == 0
    reader(ids)
    check_ids(seen, ids)


# --- keys before RoPE ------------------------------------------------------------------------


class ProjectedKeys:
    """Keys `[B, H, N, D]` of all tokens as the model's projections gave them, layer by layer."""

    def __init__(self, reader: Reader) -> None:
        layers = reader.cache.layers
        own = [i for i, layer in enumerate(layers) if isinstance(layer, CompressedLayer)]
        modules = [m for m in reader.model.modules() if getattr(m, "layer_idx", None) in own]
        attention = [m for m in modules if hasattr(m, "o_proj") or hasattr(m, "c_attn")]
        self.seen: list[list[Tensor]] = [[] for _ in own]
        for module, seen in zip(attention, self.seen, strict=True):
            last = getattr(module, "k_norm", getattr(module, "k_proj", None)) or module.c_attn
            last.register_forward_hook(partial(self._note, module.head_dim, seen))

    @staticmethod
    def _note(size: int, seen: list[Tensor], module: Any, args: Any, keys: Tensor) -> None:
        if isinstance(module, Conv1D):
            keys = keys.chunk(3, -1)[1]
        if keys.dim() == 3:
            keys = keys.unflatten(-1, (-1, size)).transpose(1, 2)
        elif keys.shape[1] != 2:  # [B, S, H, D]
            keys = keys.transpose(1, 2)
        seen.append(keys)

    def of(self, observation: Observation, mask: Tensor) -> Tensor:
        """Those of an observation's entries `[B, H, T, D]`; `mask [B, N]` is 0 at padding."""
        keys = torch.cat(self.seen[observation.layer], 2)
        first = (mask == 0).sum(1).view(-1, 1, 1)
        columns = (observation.positions + first).clamp(min=0)
        return keys.gather(2, columns[..., None].expand(-1, -1, -1, keys.shape[-1]))


def check_unrotated(seen: list[Observation], keys: ProjectedKeys, mask: Tensor) -> None:
    """Compares all observations since the last check; padding is at the front of `mask [B, N]`."""
    assert seen
    for observation in seen:
        real = observation.positions >= 0
        mine, projected = observation.unrotated(), keys.of(observation, mask)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine[real], projected[real], atol=5e-5, rtol=0)
    seen.clear()


@pytest.mark.slow
@pytest.mark.cases(2)
@BATCHES
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "qwen3", "olmo2", "smollm3", "glm4", "granite"]
)
def test_unrotated_keys_are_those_of_the_projection(family, lengths):
    method, seen = watching(Needs(KeysBeforeRope()))
    reader, ids = reader_of(build(family), method, lengths)
    keys = ProjectedKeys(reader)
    read_in_pieces(reader, ids)
    mask = prompts(lengths)[1]
    if family not in ("gpt2", "smollm3"):
        assert not torch.allclose(seen[0].keys, seen[0].unrotated(), atol=0.1)
    check_unrotated(seen, keys, mask)
    more = continuation(len(ids), 9)
    reader(more[:, :1])
    reader(more[:, 1:])  # a later turn, of which earlier entries are gone
    check_unrotated(seen, keys, mask)


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("positions", ["original", "reindex"])
def test_unrotated_keys_while_decoding(lengths, positions):
    forced = Forced(sinks=4)
    needs = Needs(KeysBeforeRope())
    method, seen = watching(needs, when=Hold(), positions=positions, forced=forced)
    reader, ids = reader_of(build("llama"), method, lengths)
    keys = ProjectedKeys(reader)
    reader(ids)
    mask = prompts(lengths)[1]
    for token in continuation(len(ids), 6).split(1, 1):
        reader(token)
        check_unrotated(seen, keys, mask)
    reader(continuation(len(ids), 9, seed=4))
    check_unrotated(seen, keys, mask)


@pytest.mark.slow
@BATCHES
def test_unrotated_keys_of_keys_that_moved(lengths):
    method, seen = watching(Needs(KeysBeforeRope()), positions="consecutive")
    reader, ids = reader_of(build("llama"), method, lengths)
    keys, mask = ProjectedKeys(reader), prompts(lengths)[1]
    reader(ids)
    for turn in range(3):
        reader(continuation(len(ids), 9, seed=turn))
        check_unrotated(seen, keys, mask)
    assert reader.cache.states[0].observers.moves.moves.max() > 20


@pytest.mark.parametrize("positions", ["original", "reindex", "consecutive"])
def test_unrotated_keys_of_a_fork(positions):
    method, seen = watching(Needs(KeysBeforeRope()), positions=positions, forced=Forced(sinks=4))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    keys = ProjectedKeys(reader)
    reader(ids)
    seen.clear()
    both = torch.cat([ids, continuation(1, 30)], 1)
    end_turn(model, fork_within(reader.cache, 8), both)
    check_unrotated(seen, keys, torch.ones_like(both))


def test_unrotated_keys_hold_the_attention_factor():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    }
    method, seen = watching(Needs(KeysBeforeRope()))
    reader, ids = reader_of(build("llama", rope_parameters=rope), method, ALONE)
    keys = ProjectedKeys(reader)
    reader(ids)
    for observation in seen:
        expected = 1.5 * keys.of(observation, torch.ones_like(ids))
        torch.testing.assert_close(observation.unrotated(), expected, atol=5e-5, rtol=0)


def test_unrotated_keys_of_fewer_entries():
    method, seen = watching(Needs(KeysBeforeRope()))
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    slots = torch.tensor([-1, 45, 50, 63]).expand(3, 2, 4)
    whole = seen[0].unrotated()
    torch.testing.assert_close(
        seen[0].at(slots).unrotated()[:, :, 1:], whole[:, :, slots[0, 0, 1:]]
    )
    moved, order = seen[0].padding_first()
    assert order is None and moved is seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cohere2", "llama4", "deepseek_v3", "gemma3n"])
def test_keys_that_cannot_be_rotated_back_are_refused(family):
    model = build(family)
    with pytest.raises(UnsupportedModel, match="there are no un-rotated keys"):
        CompressedCache(model, watching(Needs(KeysBeforeRope()))[0], BUDGET)
    CompressedCache(model, watching(Needs())[0], BUDGET)


def test_keys_that_are_normed_after_their_rotation_are_refused():
    config = HunYuanDenseV1Config(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match="how layer 0"):
        CompressedCache(model, watching(Needs(KeysBeforeRope()))[0], BUDGET)
    with pytest.raises(UnsupportedModel, match="moved for certain"):
        CompressedCache(model, "streaming_llm", BUDGET)


@pytest.mark.parametrize("given", [None, 5])
def test_other_rotary_positions_are_refused(given):
    method, _ = watching(Needs(KeysBeforeRope()))
    model = build("llama")
    reader, ids = reader_of(model, method, PADDED)
    options = {} if given is None else {"position_ids": torch.arange(64)[None] + given}
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="its number in its row"):
        model(ids, attention_mask=prompts(PADDED)[1], past_key_values=reader.cache, **options)
    other = build("gpt2")  # nothing is rotated
    cache = CompressedCache(other, watching(Needs(KeysBeforeRope()))[0], BUDGET)
    other(ids, attention_mask=prompts(PADDED)[1], past_key_values=cache)


def test_unrotated_keys_must_be_asked_for():
    method, seen = watching(Needs())
    reader, ids = reader_of(build("llama"), method, ALONE)
    reader(ids)
    with pytest.raises(KvfoldError, match=r"Needs\(KeysBeforeRope"):
        seen[0].unrotated()


@dataclass(frozen=True)
class UnrotatedNorms(Method):
    """Keeps the keys whose first rotary component was largest before RoPE."""

    def stages(self) -> Stages:
        return Stages(needs=Needs(KeysBeforeRope()), score=lambda seen: seen.unrotated()[..., 0])


def test_a_method_that_reads_unrotated_keys_keeps_what_it_says():
    reader, ids = reader_of(build("llama"), UnrotatedNorms(), ALONE)
    keys = ProjectedKeys(reader)
    reader(ids)
    first = keys.seen[1][0][0, :, :, 0]
    for head, kept in zip(first, reader.cache.positions(1)[0], strict=True):
        assert set(kept.tolist()) == set(head.topk(BUDGET).indices.tolist())


# --- norms of projected values ---------------------------------------------------------------


class OutputWeights:
    """The weights of the compressed layers' output projections `[Dm, Hq·Dv]`, by hand."""

    def __init__(self, cache: CompressedCache, model: Any) -> None:
        own = [i for i, layer in enumerate(cache.layers) if isinstance(layer, CompressedLayer)]
        modules = [m for m in model.modules() if getattr(m, "layer_idx", None) in own]
        self.weights = []
        for module in modules:
            if hasattr(module, "c_attn"):
                self.weights.append(module.c_proj.weight.detach().T)
            elif hasattr(module, "dense"):
                self.weights.append(module.dense.weight.detach())
            elif hasattr(module, "o_proj"):
                self.weights.append(module.o_proj.weight.detach())

    def norms(self, observation: Observation, order: int) -> Tensor:
        """Norms `[B, Hq, T]` of all values, each put into the place of one query head alone."""
        weight, values = self.weights[observation.layer].double(), observation.values.double()
        heads, size = values.shape[1], values.shape[3]
        query_heads = weight.shape[1] // size
        norms = []
        for head in range(query_heads):
            output = torch.zeros(len(values), values.shape[2], weight.shape[1]).double()
            output[..., head * size : (head + 1) * size] = values[:, head * heads // query_heads]
            norms.append((output @ weight.T).norm(p=order, dim=-1))
        return torch.stack(norms, 1)


@pytest.mark.slow
@pytest.mark.cases(4)
@BATCHES
@pytest.mark.parametrize(("norm", "order"), [("l2", 2), ("l1", 1)])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "qwen3", "gpt_neox", "deepseek_v3", "gpt_oss"]
)
def test_output_norms_are_those_of_the_dense_product(family, norm, order, lengths):
    method, seen = watching(Needs(OutputNorms(norm)))
    model = build(family)
    reader, ids = reader_of(model, method, lengths)
    weights = OutputWeights(reader.cache, model)
    read_in_pieces(reader, ids)
    more = continuation(len(ids), 9)
    reader(more[:, :1])
    reader(more[:, 1:])  # a later turn, of which earlier entries are gone
    assert {observation.layer for observation in seen} == set(range(len(weights.weights)))
    for observation in seen:
        mine, expected = observation.output_norms(), weights.norms(observation, order)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_output_norms_while_decoding():
    method, seen = watching(Needs(OutputNorms("l2")), when=Hold())
    model = build("llama", torch.bfloat16)
    reader, ids = reader_of(model, method, PADDED)
    weights = OutputWeights(reader.cache, model)
    reader(ids)
    for token in continuation(3, 4).split(1, 1):
        seen.clear()
        reader(token)
        for observation in seen:
            mine, expected = observation.output_norms(), weights.norms(observation, 2)
            torch.testing.assert_close(mine.double(), expected, atol=1e-5, rtol=1e-4)


def test_output_norms_follow_the_weight():
    method, seen = watching(Needs(OutputNorms("l2")))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    reader(ids)
    before = seen[0].output_norms()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(2)
    torch.testing.assert_close(seen[0].output_norms(), 2 * before)


def test_output_norms_must_be_asked_for():
    method, seen = watching(Needs())
    reader, ids = reader_of(build("llama"), method, ALONE)
    reader(ids)
    with pytest.raises(KvfoldError, match=r"Needs\(OutputNorms"):
        seen[0].output_norms()


def test_two_kinds_of_output_norms_are_refused():
    with pytest.raises(IllegalComposition, match="use one of them"):
        Needs(OutputNorms("l1")).joined(Needs(OutputNorms("l2")))


@dataclass(frozen=True)
class LargestOutput(Method):
    """Keeps the entries whose projected values are largest, in the mean over query heads."""

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(OutputNorms("l1")), score=lambda seen: seen.group_mean(seen.output_norms())
        )


def test_a_method_that_reads_output_norms_keeps_what_it_says():
    model = build("llama")
    reader, ids = reader_of(model, LargestOutput(), ALONE)
    reader(ids)
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    values = cache.layers[1].values.detach().double()[0]  # [H, T, Dv]
    weight = model.model.layers[1].self_attn.o_proj.weight.detach().double()
    for head, kept in enumerate(reader.cache.positions(1)[0]):
        columns = [weight[:, 8 * q : 8 * q + 8] for q in range(4 * head, 4 * head + 4)]
        scores = torch.stack([(values[head] @ c.T).abs().sum(-1) for c in columns]).mean(0)
        assert set(kept.tolist()) == set(scores.topk(BUDGET).indices.tolist())


# --- what every such need has in common --------------------------------------------------------

BEYOND = [Needs(TokenIds()), Needs(KeysBeforeRope()), Needs(OutputNorms("l2"))]
BEYOND += [Needs(QueryMomentsNeed())]


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_a_graph_that_evicts_is_refused(needs):
    method, _ = watching(needs, when=Hold())
    model, ids = build("llama"), prompts(ALONE)[0]
    cache = CompressedCache(model, method, BUDGET)
    with pytest.raises(KvfoldError, match="compile=True does not go with"):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=2, compile=True)


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_token_pruning_is_refused(needs):
    with pytest.raises(IllegalComposition, match="pruned between the layers"):
        Stages(needs=needs, token_pruning=lambda observation: observation.positions[:, 0])


def test_padding_is_moved_to_the_front_with_all_that_entries_have():
    method, seen = watching(Needs(TokenIds(), KeysBeforeRope()))
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    names = ("keys", "values", "positions")
    backwards = {name: getattr(seen[0], name).flip(2) for name in names}
    observed = {kind: value.flip(2) for kind, value in seen[0].observed.items()}
    last = dataclasses.replace(seen[0], observed=observed, **backwards)
    first, order = last.padding_first()
    assert order is not None
    assert torch.equal(first[TokenIds], ids_by_position(ids, first.positions))
    index = order[..., None].expand_as(last.keys)
    torch.testing.assert_close(first.unrotated(), last.unrotated().gather(2, index))


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_needs_are_joined(needs):
    assert Needs(LastQueries(3)).joined(needs) == needs.joined(Needs(LastQueries(3)))
    assert needs.joined(needs) == needs
