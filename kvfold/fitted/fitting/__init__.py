# SPDX-License-Identifier: Apache-2.0
"""Fitting: `kvfold.fit_scorer` learns KVzip's scores on a user's model; filters, heads, codecs."""
