# SPDX-License-Identifier: Apache-2.0
"""Adapters to transformers, its models and versions: attention interface, RoPE, templates."""
