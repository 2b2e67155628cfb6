# SPDX-License-Identifier: Apache-2.0
"""The attention function that transformers calls, and its handshake with the cache."""
