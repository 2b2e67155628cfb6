# SPDX-License-Identifier: Apache-2.0
"""`Rope` turns keys as the models' own files do."""

from __future__ import annotations

import pytest
import torch

from kvfold import KvfoldError
from kvfold.hf.rotation import Rotation
from kvfold.policies import Rope
from kvfold.policies.prefill import check_ropes, rope_of
from tests.helpers.models import build


@pytest.mark.parametrize(
    ("family", "interleaved"), [("llama", False), ("phi3", False), ("qwen3", False), ("glm4", True)]
)
def test_keys_turn_as_in_the_model_file(family: str, interleaved: bool) -> None:
    model = build(family)
    rope, rotation = Rope(model.model.rotary_emb.inv_freq, interleaved), Rotation(model, 0)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 7, 8, generator=draw)
    for shape in ((2,), (2, 7), (2, 3, 7)):
        shift = torch.randint(-90, 90, shape, generator=draw)
        torch.testing.assert_close(rope(keys, shift), rotation(keys, shift), atol=1e-5, rtol=0)
    assert (rope(keys, torch.tensor([5, 5])) - keys).abs().amax() > 0.1


def test_plain_frequencies_are_those_of_the_configuration() -> None:
    model = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert torch.equal(Rope.plain(8, 5e5).frequencies, model.model.rotary_emb.inv_freq)


def test_a_turn_and_its_opposite_leave_the_key() -> None:
    keys, at = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16), torch.arange(4)[None]
    again = Rope.plain(8)(Rope.plain(8)(keys.float(), at), -at)
    torch.testing.assert_close(again, keys.float(), atol=1e-5, rtol=0)
    assert Rope.plain(8)(keys, at).dtype == torch.bfloat16


def test_no_frequencies_turn_nothing() -> None:
    keys = torch.randn(1, 2, 4, 8)
    assert torch.equal(Rope(torch.zeros(0))(keys, torch.tensor([9])), keys)


def test_frequencies_are_one_row_of_finite_numbers() -> None:
    for wrong in (torch.ones(2, 2), torch.tensor([1.0, float("nan")])):
        with pytest.raises(KvfoldError, match="one finite frequency"):
            Rope(wrong)


def test_one_rope_is_of_all_layers_and_a_list_of_each() -> None:
    one, other = Rope.plain(8), Rope.plain(8, 1e6)
    assert rope_of(one, 1) is one and rope_of(None, 1) is None
    ropes = [one, None, other]
    assert [rope_of(ropes, layer) for layer in range(3)] == ropes
    for fits in (one, None, ropes, (None, None, None)):
        check_ropes(fits, 3)


def test_ropes_that_are_not_of_the_layers_are_refused() -> None:
    one = Rope.plain(8)
    with pytest.raises(KvfoldError, match="rope of 2 layers, keys of 3: give one Rope for all"):
        check_ropes([one, None], 3)
    with pytest.raises(KvfoldError, match=r"rope of layer 1 is a Tensor: give Rope\(frequencies\)"):
        check_ropes([one, one.frequencies, None], 3)
