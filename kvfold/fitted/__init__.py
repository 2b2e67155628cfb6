# SPDX-License-Identifier: Apache-2.0
"""Fits on a user's texts: their numbers, files, readers, and the fitting."""
