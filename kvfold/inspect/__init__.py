# SPDX-License-Identifier: Apache-2.0
"""Pictures of a model's attention and of the entries that a cache kept."""
