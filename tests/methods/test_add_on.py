# SPDX-License-Identifier: Apache-2.0
"""Methods for compositions only: refused alone, and the composition that the error names works."""

import re

import pytest

from kvfold.errors import IllegalComposition
from kvfold.methods.base import AddOn, parse
from kvfold.methods.registry import list_methods

ADD_ONS = [name for name, cls in list_methods().items() if issubclass(cls, AddOn)]


def test_the_registry_has_add_ons() -> None:
    assert {"merge", "every", "match", "recent"} <= set(ADD_ONS)


@pytest.mark.parametrize("name", ADD_ONS)
def test_an_add_on_alone_is_refused_by_an_error_that_names_a_composition(name: str) -> None:
    with pytest.raises(IllegalComposition, match="evicts nothing itself") as refused:
        parse(name).stages()
    named = re.search(r'example "(.+)"', str(refused.value))
    assert named is not None
    stages = parse(named[1]).stages()
    assert stages.score is not None
    assert stages != parse(named[1].split(" + ")[0]).stages()
