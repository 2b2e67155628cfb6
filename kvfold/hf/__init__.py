# SPDX-License-Identifier: Apache-2.0
"""What differs between models or versions of transformers: attention interface, RoPE, templates."""
