# SPDX-License-Identifier: Apache-2.0
"""Allocation: a total → integer entries per layer, sinks and windows included, exact in sum."""
