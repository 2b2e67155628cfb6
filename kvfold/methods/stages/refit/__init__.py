# SPDX-License-Identifier: Apache-2.0
"""Refit stages: kept entries get other values, and a bias, by what all entries give queries."""
