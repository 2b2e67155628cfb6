# SPDX-License-Identifier: Apache-2.0
"""Score stages: an `Observation` → scores `[B, H, T]`, float32, higher = keep."""
