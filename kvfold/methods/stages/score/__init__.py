# SPDX-License-Identifier: Apache-2.0
"""Scores: an `Observation` → `[B, H, T]` float32, higher = keep."""
