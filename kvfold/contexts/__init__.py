# SPDX-License-Identifier: Apache-2.0
"""Contexts: documents compressed once for many questions, and chats over them.

`context.py` compresses a document, `chat.py` and `bounded_chat.py` answer questions over it,
`answer.py` turns generated tokens into text, `files/` saves and loads contexts.
"""
