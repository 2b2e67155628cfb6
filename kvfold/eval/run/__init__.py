# SPDX-License-Identifier: Apache-2.0
"""Evaluation runs: plan, jobs, samples, and the records computed from them."""
