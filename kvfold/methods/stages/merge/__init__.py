# SPDX-License-Identifier: Apache-2.0
"""Merging: evicted entries change the kept ones they resemble (D2O) or precede (CaM)."""
