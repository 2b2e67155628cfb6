# SPDX-License-Identifier: Apache-2.0
"""Checks without labels: how far a compressed cache is from the full one, on one's own prompts."""
