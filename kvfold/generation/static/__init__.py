# SPDX-License-Identifier: Apache-2.0
"""Decoding by one compiled graph or captured step, over layers of static buffers."""
