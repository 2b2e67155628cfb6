# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness over a compressed cache: `python -m kvfold.eval.lm_eval --model kvfold`."""
