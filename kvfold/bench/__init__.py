# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: time, bytes and peak memory beside the full cache, one record per run."""
