# SPDX-License-Identifier: Apache-2.0
"""Generation: prompts whole or in chunks, compiled decoding, methods' own forwards."""
