# SPDX-License-Identifier: Apache-2.0
"""Jobs shared out among workers that each hold the model: here, in processes, on Ray."""
