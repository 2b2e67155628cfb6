# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' scores, each as its authors compute it. One prediction in, one `Scored` out."""

from kvfold.eval.metrics.scored import Scored, best, mean

__all__ = ["Scored", "best", "mean"]
