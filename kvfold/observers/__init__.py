# SPDX-License-Identifier: Apache-2.0
"""Observations: what a layer notes for a method while it reads, a file for each kind."""
