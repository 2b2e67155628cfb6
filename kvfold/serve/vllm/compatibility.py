# SPDX-License-Identifier: Apache-2.0
"""Check that a context was made with the served model; once per version of its file."""

from __future__ import annotations

from weakref import WeakSet

from kvfold.contexts.files.coding import basis_of
from kvfold.contexts.files.damage import told_as_damage
from kvfold.contexts.files.format import opened
from kvfold.errors import ContextFileError
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import ServedContext, ServedFolder


class CompatibilityCheck:
    """Compares contexts with the model of `meta_model`, served in `dtype` ("bfloat16")."""

    def __init__(self, served_folder: ServedFolder, meta_model: MetaModel, dtype: str) -> None:
        self.served_folder, self.meta_model, self.dtype = served_folder, meta_model, dtype
        self._fits: WeakSet[ServedContext] = WeakSet()

    def check(self, served: ServedContext) -> None:
        """Raises ContextFileError for a context of another model, RoPE, dtype or basis."""
        if served in self._fits:
            return
        with opened(self.served_folder.path(served.id)) as file, told_as_damage(file):
            if file.header.dtype != self.dtype:
                raise ContextFileError(
                    f"{file.path} holds {file.header.dtype}, and vLLM computes in {self.dtype}: "
                    f"serve with --dtype {file.header.dtype}, or compress the document again"
                )
            self.meta_model.check(file)
            basis_of(file)
        self._fits.add(served)
