# SPDX-License-Identifier: Apache-2.0
"""From tasks, methods and budgets to records: what is run, how, by whom, and what it comes to."""
