# SPDX-License-Identifier: Apache-2.0
"""Layers while a compiled graph decodes: buffers of a fixed size, or segments that go on."""
