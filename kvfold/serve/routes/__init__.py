# SPDX-License-Identifier: Apache-2.0
"""The paths of the endpoint."""
