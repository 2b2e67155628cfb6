# SPDX-License-Identifier: Apache-2.0
"""Jobs run by workers that each hold the model: in this process, in several, on a Ray cluster."""
