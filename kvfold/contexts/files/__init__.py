# SPDX-License-Identifier: Apache-2.0
"""Context files: `write.py` saves, `read.py` loads, `format.py` defines their content."""
