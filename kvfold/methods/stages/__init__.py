# SPDX-License-Identifier: Apache-2.0
"""The stages that methods are made of: score, allocate, select, merge."""
