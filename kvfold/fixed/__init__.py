# SPDX-License-Identifier: Apache-2.0
"""Layers while a compiled graph decodes: everything in buffers whose size does not change."""
