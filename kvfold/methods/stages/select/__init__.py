# SPDX-License-Identifier: Apache-2.0
"""Selection: scores, counts and a forced set → ascending slots to keep."""
