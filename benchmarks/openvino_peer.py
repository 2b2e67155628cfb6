# SPDX-License-Identifier: Apache-2.0
"""Cache eviction of OpenVINO GenAI on the needles in a novel of kvfold's leaderboard.

    python -m benchmarks.openvino_peer MODEL GGUF BOOK PYTHON OUT.jsonl [--samples 40]

MODEL is the folder that `make real` makes, GGUF the file that it is made of, BOOK the published
run's haystack, PYTHON the interpreter of an environment with openvino-genai==2026.4.1.0, which
reads kvfold's token ids of context and question. A row of OUT is one answer; a rerun resumes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

TASK, LENGTH, ANSWER_TOKENS = "ruler_niah_single_2", 1024, 16
BLOCK, POOL = 32, 64  # tokens of a block on a CPU; blocks of the cache, of which an answer takes 30
FLOATS = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}


@dataclass(frozen=True)
class Setting:
    """Tokens, in whole blocks; the last `window` queries score the prompt, 0: all of them."""

    mode: str  # "full", or how scores of steps are aggregated
    most: int = 192  # a fifth of 926 tokens is 185
    window: int = 8
    start: int = BLOCK
    recent: int = BLOCK


SETTINGS = [
    Setting("full", 0, 0, 0, 0),
    Setting("SUM"),
    Setting("SUM", most=160),
    Setting("NORM_SUM"),
    Setting("SUM", window=0),
    Setting("NORM_SUM", window=0),
]


@dataclass(frozen=True)
class Row:
    """One answer; `blocks` are those that the cache has when each step begins."""

    setting: dict[str, Any]
    index: int
    tokens: int
    blocks: list[int]
    prediction: str
    score: float
    prefill_seconds: float
    step_seconds: float  # median


def answer(gguf: str, setting: Setting, prompts: Sequence[dict[str, Any]], end: int) -> None:
    """Prints a line of JSON for each prompt. Runs in the environment of openvino-genai."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.max_num_batched_tokens = POOL, POOL * BLOCK
    options = FLOATS | {"INFERENCE_NUM_THREADS": 1}
    if setting.mode != "full":
        scheduler.use_cache_eviction = True
        sizes, mode = (setting.start, setting.recent, setting.most), setting.mode
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            *sizes, genai.AggregationMode.__members__[mode], snapkv_window_size=setting.window
        )
    pipeline = genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", options)
    greedy = genai.GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=end)
    for prompt in prompts:
        ids = ov.Tensor(np.array([prompt["ids"]], dtype=np.int64))
        print(json.dumps(steps(pipeline, prompt["index"], ids, greedy)), flush=True)


def steps(pipeline: Any, number: int, ids: Any, greedy: Any) -> dict[str, Any]:
    """One request, step by step; the pipeline tells its usage in percent of the pool's blocks."""
    handle, blocks, seconds = pipeline.add_request(number, ids, greedy), list[int](), list[float]()
    while pipeline.has_non_finished_requests():
        began = time.perf_counter()
        pipeline.step()
        seconds.append(time.perf_counter() - began)
        blocks.append(round(pipeline.get_metrics().cache_usage * POOL / 100))
    (said,) = handle.read_all()
    return {"index": number, "ids": said.generated_ids, "blocks": blocks, "seconds": seconds}


def measured(given: argparse.Namespace, done: Sequence[Row]) -> Iterator[Row]:
    """A row for each setting and sample that is not `done`."""
    from transformers import AutoTokenizer

    from kvfold.eval.evaluate import drawn
    from kvfold.eval.run.prompt import SamplePrompt
    from kvfold.eval.tasks import SampleRequest, TaskSample
    from kvfold.hf.chat_template import token_count

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    count = partial(token_count, tokenizer)
    request = SampleRequest(samples=given.samples, count=count, haystack=given.book)
    (of_task,) = drawn([TASK], request, [LENGTH])
    (metric,), questions, ids = of_task.task.metrics.values(), {}, {}
    for sample in of_task.samples:
        assert isinstance(sample, TaskSample)
        (question,), prompt = sample.questions, SamplePrompt.of(sample, tokenizer)
        questions[sample.index] = question
        ids[sample.index] = [*prompt.ids[0].tolist(), *prompt.question_ids(question)[0].tolist()]
    for setting in map(asdict, SETTINGS):
        left = ids.keys() - {row.index for row in done if row.setting == setting}
        prompts = [{"index": index, "ids": ids[index]} for index in sorted(left)]
        for said in peer(given, [setting, prompts, tokenizer.eos_token_id]) if prompts else ():
            index = said["index"]
            text = str(tokenizer.decode(said["ids"], skip_special_tokens=True))
            score, (first, *others) = metric(text, questions[index]).value, said["seconds"]
            seconds = round(first, 3), round(median(others), 4)
            yield Row(setting, index, len(ids[index]), said["blocks"], text, score, *seconds)


def peer(given: argparse.Namespace, asked: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Lines of JSON that `answer` prints in the other environment, parsed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([given.python, __file__], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        json.dump([str(given.gguf), *asked], process.stdin)
        process.stdin.close()
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise SystemExit(f"{asked[0]}: openvino-genai ended with {process.returncode}")


if __name__ == "__main__" and len(sys.argv) == 1:
    gguf, setting, prompts, end = json.load(sys.stdin)
    answer(gguf, Setting(**setting), prompts, end)
elif __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "gguf", "book", "python", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--samples", type=int, default=40)
    given = parser.parse_args()
    with given.out.open("a+", encoding="utf-8") as out:
        out.seek(0)
        for row in measured(given, [Row(**json.loads(line)) for line in out]):
            print(json.dumps(asdict(row)), file=out, flush=True)
