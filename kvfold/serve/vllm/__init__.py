# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts in a stock vLLM, loaded by a KV connector as prefixes of requests.

`export.py` fits a context to vLLM's pages; `connector.py` has a scheduler side
(`scheduler.py`) and a worker side (`worker.py`); `proxy.py` speaks to clients.
"""
