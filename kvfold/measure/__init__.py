# SPDX-License-Identifier: Apache-2.0
"""Measurement of a piece of work: its time, its operations, its memory, and the machine."""
