# SPDX-License-Identifier: Apache-2.0
"""What all evidence is told with: records, intervals, tables, pictures, pages and their files."""
