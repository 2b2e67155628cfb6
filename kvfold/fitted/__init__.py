# SPDX-License-Identifier: Apache-2.0
"""What is fitted on a user's texts: its numbers, their files, what reads them, and the fitting."""
