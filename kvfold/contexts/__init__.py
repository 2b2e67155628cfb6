# SPDX-License-Identifier: Apache-2.0
"""Contexts: documents that are compressed once and asked often, and chats over them."""
