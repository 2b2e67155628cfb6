# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible HTTP server over compressed contexts, on one machine.

`app.py` and `routes/` speak HTTP, `engine.py` runs the model in process with transformers,
`context_pool.py` holds contexts in memory or on disk. `vllm/` serves the same files with a stock
vLLM.
"""
