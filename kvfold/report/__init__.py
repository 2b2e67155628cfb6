# SPDX-License-Identifier: Apache-2.0
"""From records to what a person reads: tables, pictures, and one page."""
