# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: time, cache bytes and peak memory against the full cache, round by round."""
