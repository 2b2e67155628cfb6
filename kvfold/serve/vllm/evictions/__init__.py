# SPDX-License-Identifier: Apache-2.0
"""Eviction inside a running vLLM: from a prompt, as soon as it has been read.

The scheduler's side decides when, and takes the blocks. The worker's side decides which entries,
and copies them. The prompt's own blocks go back to vLLM, whose prefix cache keeps them as they are.
"""
