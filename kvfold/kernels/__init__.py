# SPDX-License-Identifier: Apache-2.0
"""Attention that also says how much each entry received. `reference.py` is the truth."""
