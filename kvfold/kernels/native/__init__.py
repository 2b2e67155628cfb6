# SPDX-License-Identifier: Apache-2.0
"""Kernels in C++ for a CPU, compiled when first needed; each is the sibling of one in Triton."""
