# SPDX-License-Identifier: Apache-2.0
"""A text that is looked at once, and dense attention to compare with."""

from __future__ import annotations

import base64
import copy
from html.parser import HTMLParser

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from kvfold.cli import app
from tests.helpers.models import VOCABULARY

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


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "100"})
