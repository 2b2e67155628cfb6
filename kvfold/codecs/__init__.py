# SPDX-License-Identifier: Apache-2.0
"""Codecs of context files: fewer bytes for contexts that wait on a disk, decoded when loaded."""
