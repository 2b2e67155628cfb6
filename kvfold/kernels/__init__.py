# SPDX-License-Identifier: Apache-2.0
"""Attention kernels over dense and ragged entries, some with column statistics.

`reference.py` is the naive truth of every kernel; `dispatch.py` alone chooses among them.
"""
