# SPDX-License-Identifier: Apache-2.0
"""Experimental: layers of vLLM that hold a part of a context's positions, as PyramidKV sizes them.

A layer that keeps fewer entries than another owns the last pages of a request only. Parts are those
of the server, not of a context. It needs more of vLLM than a connector is promised: a page
specification of its own, the CPU's attention backend, and one method that is replaced.
"""
