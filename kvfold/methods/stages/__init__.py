# SPDX-License-Identifier: Apache-2.0
"""Stages of methods: score, allocate, select, merge. Pure functions of an `Observation`."""
