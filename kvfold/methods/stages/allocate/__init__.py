# SPDX-License-Identifier: Apache-2.0
"""Allocation stages: a total → entries per layer, forced ones included, with an exact sum."""
