# SPDX-License-Identifier: Apache-2.0
"""One metric's value."""


def value(scored):
    """A score that nothing went wrong with."""
    assert scored.failed is None
    return scored.value
