# SPDX-License-Identifier: Apache-2.0
"""Ways of attention to segments of a ragged store, one a file; `dispatch.segments_path` chooses."""
