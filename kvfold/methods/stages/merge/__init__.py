# SPDX-License-Identifier: Apache-2.0
"""Merge stages: evicted entries change the kept ones they resemble (D2O) or precede (CaM)."""
