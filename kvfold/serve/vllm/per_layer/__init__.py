# SPDX-License-Identifier: Apache-2.0
"""Per-layer budgets in vLLM, such as PyramidKV's.

A layer with a smaller part of a context's positions holds only the last pages of a request. Parts
are fixed per server, not per context. This goes beyond vLLM's connector interface: it registers a
cache spec and a CPU attention backend, and replaces one method of vLLM.
"""
