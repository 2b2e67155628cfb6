# SPDX-License-Identifier: Apache-2.0
"""Policies: which entries a method keeps, of an engine's own tensors; no model, no transformers."""

from kvfold.policies.kept import Kept as Kept
from kvfold.policies.method_policy import Policy as Policy
from kvfold.policies.method_policy import PolicyNeeds as PolicyNeeds
from kvfold.policies.method_policy import policy as policy
from kvfold.policies.prefill import Prefill as Prefill
from kvfold.policies.prefill import split_heads as split_heads
from kvfold.policies.rope import Rope as Rope
from kvfold.policies.sharing import SharingLoss as SharingLoss
from kvfold.policies.sharing import sharing_loss as sharing_loss
