# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' metrics as their authors compute them: from a prediction to a `Scored`."""

from kvfold.eval.metrics.scored import Scored, best, mean

__all__ = ["Scored", "best", "mean"]
