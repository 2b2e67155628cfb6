# SPDX-License-Identifier: Apache-2.0
"""The compressed cache: layers, their state, prefill and decode eviction, forks."""
