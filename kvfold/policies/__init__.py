# SPDX-License-Identifier: Apache-2.0
"""Policies: a method's choice of entries from an engine's tensors, without a model."""

from kvfold.policies.key_codes import KeyCodes as KeyCodes
from kvfold.policies.method_policy import Kept as Kept
from kvfold.policies.method_policy import Policy as Policy
from kvfold.policies.method_policy import PolicyNeeds as PolicyNeeds
from kvfold.policies.method_policy import policy as policy
from kvfold.policies.prefill import Prefill as Prefill
from kvfold.policies.prefill import Rope as Rope
from kvfold.policies.prefill import split_heads as split_heads
from kvfold.policies.sharing import SharingLoss as SharingLoss
from kvfold.policies.sharing import sharing_loss as sharing_loss
