# SPDX-License-Identifier: Apache-2.0
"""Reports on evaluation records: tables, figures and a self-contained HTML page."""
