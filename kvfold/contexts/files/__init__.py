# SPDX-License-Identifier: Apache-2.0
"""Contexts as files."""
