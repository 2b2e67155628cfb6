# SPDX-License-Identifier: Apache-2.0
"""Selection stages: scores, counts and forced entries → ascending slots to keep."""
