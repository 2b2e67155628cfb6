# SPDX-License-Identifier: Apache-2.0
"""vLLM's greedy answers over contexts; run in its environment: `MODEL FOLDER`.

`asked.json` in the folder names contexts and their questions' tokens; `answers.json` is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

import tests_vllm.conftest  # noqa: F401  settings of vLLM on a CPU
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.placeholders import ServedFolder
from kvfold.serve.vllm.request import ContextPrompt

BLOCK = 32  # entries of a page


def main(model: str, folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    transfer = KVTransferConfig(
        kv_connector="KvfoldConnector",
        kv_connector_module_path="kvfold.serve.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"contexts": str(folder)},
    )
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=4,
        block_size=BLOCK,
        kv_transfer_config=transfer,
    )
    served = ServedFolder(folder, Paged(BLOCK))
    answers = {}
    for name, questions in asked["questions"].items():
        requests = [ContextPrompt(served.get(name), question) for question in questions]
        outputs = llm.generate(
            [request.prompt for request in requests],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=asked["new"],
                    ignore_eos=True,
                    extra_args=request.extra_args,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
