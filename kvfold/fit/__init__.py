# SPDX-License-Identifier: Apache-2.0
"""Fitting of scorers: `kvfold.fit_scorer` learns on a user's own model what KVzip would score."""
