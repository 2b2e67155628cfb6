# SPDX-License-Identifier: Apache-2.0
"""All that touches transformers: models, attention interface, RoPE, cache layers, templates."""
