# SPDX-License-Identifier: Apache-2.0
"""Pages of single heads in stock vLLM, so that every layer and KV head keeps its own entries.

vLLM's cache of a layer is head-major inside a block. It is viewed as pages of one head each, and
its kernel called with each head of a request as a request of its own. A layer's heads take as many
blocks as their pages fill, whatever each of them keeps.
"""
