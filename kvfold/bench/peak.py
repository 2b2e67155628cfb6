# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a participant's prefill, as a process of its own that loads the model anew."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import FullParticipant, LocalParticipant, MethodParticipant
from kvfold.bench.sdpa_variants import SdpaChoice, SdpaVariant
from kvfold.bench.transformers_quantized import QuantizedParticipant
from kvfold.measure.peak import WARM_UP, peak_during


def main() -> None:
    """Reads a participant's spec as JSON from standard input, prints its peak as JSON."""
    spec = json.load(sys.stdin)
    torch.set_num_threads(spec["threads"])
    subject = BenchModel.of(spec["name"], spec["dtype"], spec["seed"])
    participant: LocalParticipant
    if spec["side"] == "baseline":
        kernels = SdpaChoice(SdpaVariant(spec["prefill"]), SdpaVariant(spec["decode"]))
        participant = FullParticipant(subject, kernels)
    elif spec["side"] == "transformers":
        participant = QuantizedParticipant(subject)
    else:
        participant = MethodParticipant(subject, spec["method"], spec["budget"])
    ids: Tensor = subject.tokens(spec["batch"], spec["length"])
    # Warm-up: weights are paged in and libraries initialised before the measurement.
    participant.prefill(ids[:, :WARM_UP], 1)
    participant.free()
    peak = peak_during(lambda: participant.prefill(ids, spec["room"]))
    print(json.dumps({"peak_bytes": peak}))


if __name__ == "__main__":
    main()
