# SPDX-License-Identifier: Apache-2.0
"""Tools of all evidence: records, intervals, tables, pictures, pages and their files."""
