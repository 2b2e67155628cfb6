# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts in an unmodified vLLM: each is an external prefix of its requests."""
