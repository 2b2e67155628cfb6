# SPDX-License-Identifier: Apache-2.0
"""Compensation: what is saved of the entries that are evicted."""
