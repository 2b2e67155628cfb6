# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint over compressed contexts: one machine, transformers in process."""
