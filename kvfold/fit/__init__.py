# SPDX-License-Identifier: Apache-2.0
"""The old address of `kvfold.fitted.fitting`, until 0.2."""
