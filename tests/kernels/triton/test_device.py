# SPDX-License-Identifier: Apache-2.0
"""The GPU that is current while a kernel is launched."""

from contextlib import contextmanager

import torch

from kvfold.kernels.triton.device import on_its_device


def test_a_function_runs_on_the_device_of_its_first_argument(monkeypatch):
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    @on_its_device
    def launched(first, second, *, third=0):
        """Its text."""
        return list(current), second, third

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    first, second = torch.ones(2), torch.ones(3)
    assert launched(first, second, third=4) == ([first], second, 4)
    assert current == [] and launched.__doc__ == "Its text."
