# SPDX-License-Identifier: Apache-2.0
"""The old address of `kvfold.fitted.fitting.passages`, until 0.2."""

from warnings import warn

from kvfold.fitted.fitting.passages import drawn as drawn

warn("kvfold.fit.passages is kvfold.fitted.fitting.passages now", DeprecationWarning, stacklevel=2)
