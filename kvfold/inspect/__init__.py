# SPDX-License-Identifier: Apache-2.0
"""Pictures of what a model attends to and of what a cache kept."""
