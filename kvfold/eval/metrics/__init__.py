# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' metrics as their authors compute them: from a prediction to a `MetricScore`."""

from kvfold.eval.metrics.base import MetricScore, best, mean

__all__ = ["MetricScore", "best", "mean"]
