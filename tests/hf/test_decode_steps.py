# SPDX-License-Identifier: Apache-2.0
"""Another call for a thread's decode steps."""

from __future__ import annotations

from threading import Thread
from typing import Any

from kvfold.hf.decode_steps import decode_steps_by


class Model:
    """As much of a model as `generate` asks for its steps."""

    def get_compiled_call(self, config: Any) -> Any:
        return "compiled", self, config


def test_inside_the_context_steps_are_made_by_the_choice():
    model = Model()
    with decode_steps_by(model, lambda config: ("chosen", config)):
        assert model.get_compiled_call(3) == ("chosen", 3)
        with decode_steps_by(model, lambda config: "inner"):
            assert model.get_compiled_call(3) == "inner"
        assert model.get_compiled_call(3) == ("chosen", 3)
    assert not vars(model)
    assert model.get_compiled_call(3) == ("compiled", model, 3)


def test_other_threads_and_models_keep_their_own():
    model, other, found = Model(), Model(), []
    with decode_steps_by(model, lambda config: "chosen"):
        thread = Thread(target=lambda: found.append(model.get_compiled_call(3)))
        thread.start()
        thread.join()
        assert other.get_compiled_call(3) == ("compiled", other, 3)
    assert found == [("compiled", model, 3)]
