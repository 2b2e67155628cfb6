# SPDX-License-Identifier: Apache-2.0
"""Methods that only store entries in another form: nothing else runs, and options are checked."""

import pytest

from kvfold.errors import KvfoldError
from kvfold.methods.base import Encoder, parse
from kvfold.methods.registry import list_methods

ENCODERS = [name for name, cls in list_methods().items() if issubclass(cls, Encoder)]


def test_the_registry_has_encoders() -> None:
    assert {"kivi", "minicache", "think", "turboquant"} <= set(ENCODERS)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_takes_no_budget_and_evicts_nothing(name: str) -> None:
    method = parse(name)
    stages = method.stages()
    assert not method.takes_budget and method.by_head
    assert stages.encode is not None
    assert stages.score is None and stages.allocate is None


@pytest.mark.parametrize(
    "spec", ["kivi:bits=3", "minicache:gamma=2", "think:ratio=1.5", "turboquant:keys=5"]
)
def test_an_option_that_its_encoding_cannot_have_is_refused_at_once(spec: str) -> None:
    with pytest.raises(KvfoldError):
        parse(spec)
