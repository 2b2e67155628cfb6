# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts as files."""
