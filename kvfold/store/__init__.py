# SPDX-License-Identifier: Apache-2.0
"""Stores: where entries live, and what they cost in bytes."""
