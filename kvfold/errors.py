# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, by kind. Each message says what is wrong and what to do."""


class KvfoldError(ValueError):
    """Anything kvfold refuses."""


class BudgetError(KvfoldError):
    """A budget that is not positive, cannot be read, or cannot hold what must be kept."""


class UnsupportedModel(KvfoldError):
    """A model that would be answered wrongly, and is therefore refused."""


class IllegalComposition(KvfoldError):
    """Methods or stages that do not fit together."""


class ContextFileError(KvfoldError):
    """A saved context that is damaged, or was made with another model."""
