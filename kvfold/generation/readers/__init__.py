# SPDX-License-Identifier: Apache-2.0
"""Readers of a prompt, one a file: `reading.reader_of` chooses by the method's stages."""
