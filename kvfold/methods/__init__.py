# SPDX-License-Identifier: Apache-2.0
"""Methods, one file each; `base.py` defines a method, `stages/` holds the stages they share."""
