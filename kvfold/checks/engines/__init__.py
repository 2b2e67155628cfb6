# SPDX-License-Identifier: Apache-2.0
"""Checks of other engines, by the log probabilities that their OpenAI-compatible endpoints give."""
