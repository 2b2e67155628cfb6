# SPDX-License-Identifier: Apache-2.0
"""Decoding by one compiled graph, over layers of static buffers or ragged heads."""
