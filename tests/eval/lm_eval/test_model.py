# SPDX-License-Identifier: Apache-2.0
"""The harness's model `kvfold`: as plain `hf` when all is kept, and changed when it is not."""

import itertools
import json
import os
import random
import re
import sys
from functools import partial

# Read while these libraries are imported.
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

import pytest
import torch

import kvfold
from kvfold.bundled import FOLDER
from kvfold.eval import short_ruler
from kvfold.eval.lm_eval.score import ScoringSplit
from kvfold.hf.chat_template import PromptFrame, token_count
from tests.helpers.budgets import HOLDING, NAMED
from tests.helpers.truth import MaskedDense, Reader

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvfold.eval.lm_eval import __main__ as program
from kvfold.eval.lm_eval.model import KvfoldLM

LENGTHS = (200, 330, 260, 400)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/records.json}}
  cache_dir: {folder}/cache
test_split: test
output_type: {kind}
{rest}
"""
TASKS = {
    "choice": (
        "multiple_choice",
        "doc_to_text: prompt\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
    ),
    "answer": (
        "generate_until",
        "doc_to_text: prompt\ndoc_to_target: answer\ngeneration_kwargs: {until: ['.'], "
        "max_gen_toks: 12}\nmetric_list: [{metric: exact_match, regexes_to_ignore: [' ']}]",
    ),
    "text": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: noise\nmetric_list: [{metric: word_perplexity}]",
    ),
}


@pytest.fixture(scope="module")
def records():
    """Needles in noise, each with the document's other numbers as wrong choices."""
    _, tokenizer = kvfold.bundled_model()
    frame, rng, made = PromptFrame.of(tokenizer), random.Random(0), []
    for length in LENGTHS:
        sample = short_ruler.generate("multikey", length, partial(token_count, tokenizer), rng)
        question, numbers = sample.questions[0], re.findall(r"\d{7}", sample.document)
        prompt = f"{frame.before}{sample.document}\n{question.text}{frame.after}{question.prefix}"
        gold = numbers.index(question.answers[0])
        made.append(
            {
                "prompt": prompt,
                "choices": numbers,
                "gold": gold,
                "answer": numbers[gold],
                "noise": sample.document[:400],
            }
        )
    return made


@pytest.fixture(scope="module")
def tasks(records, tmp_path_factory):
    """A folder with the local tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "records.json").write_text(json.dumps(records))
    for name, (kind, rest) in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            TASK.format(name=name, kind=kind, rest=rest, folder=folder)
        )
    return folder


@pytest.fixture(scope="module")
def plain():
    return HFLM(str(FOLDER), dtype="float32", device="cpu")


def compressed(method, budget=None, **options):
    return KvfoldLM("bundled", method=method, budget=budget, device="cpu", **options)


def run(model, folder, *names):
    """Results of local tasks, and each task's responses in order."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0
    )
    answers = {
        name: [response[0] for sample in found["samples"][name] for response in sample["resps"]]
        for name in names
    }
    return found, answers


def likelihoods(*answers):
    return [[likely for likely, _ in given["choice"]] for given in answers]


def pairs(*requests, kind="loglikelihood"):
    return [Instance(kind, {}, request, index) for index, request in enumerate(requests)]


def of_records(records):
    return pairs(*((r["prompt"], f" {choice}") for r in records for choice in r["choices"]))


@pytest.fixture(scope="module")
def scored(plain, tasks):
    """What plain `hf` makes of the tasks; the model has to be right for tests to say anything."""
    found, answers = run(plain, tasks, *TASKS)
    assert found["results"]["choice"]["acc,none"] == 1.0
    assert found["results"]["answer"]["exact_match,none"] == 1.0
    return found, answers


@pytest.mark.slow
def test_everything_kept_scores_as_plain_hf(tasks, scored):
    expected, given = scored
    found, answers = run(compressed("streaming_llm", 4000), tasks, *TASKS)
    for name in ("choice", "answer"):
        assert found["results"][name] == expected["results"][name]
    assert answers["answer"] == given["answer"]
    assert [greedy for _, greedy in answers["choice"]] == [greedy for _, greedy in given["choice"]]
    ours, theirs = likelihoods(answers, given)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert answers["text"] == pytest.approx(given["text"], rel=1e-5)
    held = found["config"]["kvfold"]
    assert all(
        held[kind]["whole"] == held[kind]["caches"] for kind in ("log_likelihood", "rolling")
    )


@pytest.mark.whole
def test_a_small_budget_changes_every_score(tasks, scored):
    _, given = scored
    found, answers = run(compressed("streaming_llm", 40), tasks, *TASKS)
    assert found["results"]["choice"]["acc,none"] < 1.0
    assert found["results"]["answer"]["exact_match,none"] < 0.5
    changes = [
        abs(ours - theirs) for ours, theirs in zip(*likelihoods(answers, given), strict=True)
    ]
    assert min(changes) > 1e-3
    assert answers["text"] != pytest.approx(given["text"], rel=1e-3)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv:window=8", "adakv", "h2o"])
def test_log_likelihoods_are_those_of_a_full_cache_with_evicted_entries_hidden(method, records):
    lm = compressed(method, 0.2)
    records = records[:2]
    found = lm.loglikelihood(of_records(records), disable_tqdm=True)
    model, _ = kvfold.bundled_model()
    hidden, _ = kvfold.bundled_model()
    expected = []
    for record in records:
        for choice in record["choices"]:
            context, after = lm._encode_pair(record["prompt"], f" {choice}")
            cache = kvfold.CompressedCache(model, method, 0.2)
            first = torch.tensor([context[:-1]])
            Reader(model, cache)(first)
            truth = MaskedDense(hidden)
            truth(first)
            truth.hide(cache)
            logits = truth(torch.tensor([[context[-1], *after[:-1]]]))[0].log_softmax(-1)
            expected.append(
                sum(float(row[token]) for row, token in zip(logits, after, strict=True))
            )
    assert [likely for likely, _ in found] == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_a_single_token_is_predicted_from_the_compressed_cache(records, plain):
    requests = pairs(*((records[3]["prompt"], choice) for choice in (" 1", " 2", " the")))
    lm = compressed("snapkv", 48)
    assert len(lm._encode_pair(*requests[0].args)[1]) == 1
    changed = lm.loglikelihood(requests, disable_tqdm=True)
    whole = plain.loglikelihood(requests, disable_tqdm=True)
    apart = [abs(a - b) for (a, _), (b, _) in zip(changed, whole, strict=True)]
    assert min(apart) > 1e-3


@pytest.mark.slow
def test_a_context_is_compressed_once_and_answers_do_not_see_each_other(records):
    lm = compressed("h2o", 0.3)
    requests = of_records(records)
    together = lm.loglikelihood(requests, disable_tqdm=True)
    assert len(lm.cache_records["log_likelihood"].caches) == len(records)
    mixed = sorted(range(len(requests)), key=lambda index: requests[index].args[1])
    apart = lm.loglikelihood([requests[index] for index in mixed], disable_tqdm=True)
    assert [together[index] for index in mixed] == apart
    alone = [lm.loglikelihood([request], disable_tqdm=True)[0] for request in requests[:3]]
    assert alone == together[:3]


@pytest.mark.slow
def test_boundaries_are_those_of_hflm(plain):
    """No context, a context that is one token, and words that continue within a token."""
    requests = pairs(
        ("", "The grass is green."),
        ("", "<|bos|>The"),
        ("The", " sky"),
        ("The sky is ", "blue"),
        ("The sky is bl", "ue. The sun"),
        ("12", "34"),
    )
    lm = compressed("full")
    found = lm.loglikelihood(requests, disable_tqdm=True)
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    assert [a for a, _ in found] == pytest.approx([b for b, _ in expected], abs=1e-4)
    assert [a for _, a in found] == [b for _, b in expected]


@pytest.mark.slow
def test_what_is_too_long_is_cut_as_hflm_cuts_it_and_counted(records, plain):
    short = HFLM(plain.model, tokenizer=plain.tokenizer, max_length=250)
    lm = compressed("full", max_length=250)
    requests = of_records(records)
    found = lm.loglikelihood(requests, disable_tqdm=True)
    expected = short.loglikelihood(requests, disable_tqdm=True)
    assert [a for a, _ in found] == pytest.approx([b for b, _ in expected], abs=1e-4)
    lengths = [sum(map(len, lm._encode_pair(*request.args))) for request in requests]
    # The last token is predicted, but not read.
    assert lm.truncated.requests == sum(length > 251 for length in lengths) > 0
    assert lm.truncated.tokens == sum(max(0, length - 251) for length in lengths)
    before = lm.truncated.requests
    options = {"until": ["."], "max_gen_toks": 8}
    prompts = pairs(*((r["prompt"], options) for r in records), kind="generate_until")
    assert lm.generate_until(prompts, True) == short.generate_until(prompts, True)
    tokens = [len(lm.tok_encode(record["prompt"])) for record in records]
    assert lm.truncated.requests - before == sum(count > 242 for count in tokens)


@pytest.mark.slow
def test_prompts_of_a_padded_batch_are_answered_as_alone(records):
    options = {"until": ["."], "max_gen_toks": 12}
    prompts = pairs(*((r["prompt"], options) for r in records), kind="generate_until")
    one = compressed("snapkv", 0.3).generate_until(prompts, True)
    lm = compressed("snapkv", 0.3, batch_size=3)
    assert lm.generate_until(prompts, True) == one
    assert len(lm.cache_records["generation"].caches) == 2
    assert len(set(one)) > 1


@pytest.mark.slow
def test_perplexity_is_that_of_a_band_and_sinks(records, plain):
    """StreamingLLM's truth is one forward in which each token sees four sinks and the newest."""
    budget, text = 24, records[0]["noise"]
    lm = compressed("streaming_llm_original", budget)
    (found,) = lm.loglikelihood_rolling(pairs((text,)), disable_tqdm=True)
    tokens = [lm.prefix_token_id, *lm.tok_encode(text)]
    count = len(tokens) - 1
    assert count > 2 * budget
    past = torch.arange(count)[:, None] - torch.arange(count)
    seen = (past >= 0) & ((past <= budget - 4) | (torch.arange(count) < 4))
    mask = torch.zeros(1, 1, count, count).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = plain.model(torch.tensor([tokens[:-1]]), attention_mask=mask).logits[0]
    likely = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])
    assert found == pytest.approx(float(likely.sum()), abs=1e-3)


@pytest.mark.slow
def test_windows_of_a_text_begin_as_hflm_begins_them(records, plain):
    short = HFLM(plain.model, tokenizer=plain.tokenizer, max_length=20)
    requests = pairs((records[0]["noise"],))
    found = compressed("h2o", 64, max_length=20).loglikelihood_rolling(requests, True)
    assert found == pytest.approx(short.loglikelihood_rolling(requests, True), rel=1e-5)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("method", [name for name in NAMED if name != "full"])
def test_every_method_has_its_effect_on_log_likelihoods(method, records, plain):
    budget = 0.3 if kvfold.parse(method).takes_budget else None
    requests = of_records(records[1:2])
    found = compressed(method, budget).loglikelihood(requests, disable_tqdm=True)
    whole = plain.loglikelihood(requests, disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, whole, strict=True)) > 1e-3


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", HOLDING)
def test_every_method_that_holds_its_size_streams_within_it(method, records):
    lm = compressed(method, 40)
    lm.loglikelihood_rolling(pairs((records[0]["noise"],)), disable_tqdm=True)
    (kept,) = lm.cache_records["rolling"].caches
    # The last token is predicted, but not read; another one stands before the first.
    read = len(lm.tok_encode(records[0]["noise"]))
    assert read > 80
    assert kept.fraction == pytest.approx(40 / read)


@pytest.mark.slow
def test_kvzip_repeats_prompts_with_the_models_own_tokenizer(records):
    lm = compressed("kvzip", 0.5)
    options = {"until": ["."], "max_gen_toks": 12}
    prompts = pairs(*((r["prompt"], options) for r in records), kind="generate_until")
    answers = lm.generate_until(prompts, True)
    assert all(r["answer"] in answer for r, answer in zip(records, answers, strict=True))
    assert lm.cache_records["generation"].summary()["kept_most"] < 0.7


@pytest.mark.slow
def test_the_record_says_what_was_kept(tasks):
    found, _ = run(compressed("snapkv", 0.25, seed=3), tasks, "choice", "answer")
    record = json.loads(json.dumps(found["config"]["kvfold"]))
    assert record["method"].startswith("snapkv:window=")
    assert record["budget"] == "0.25 of the tokens seen"
    assert (record["kept_nominal"], record["seed"]) == (0.25, 3)
    assert record["question_aware"] is True
    assert record["truncated"] == {"requests": 0, "tokens": 0}
    scored = record["log_likelihood"]
    assert scored["caches"] == len(LENGTHS) and scored["whole"] == 0
    assert 0.24 < scored["kept_mean"] <= 0.25
    assert scored["nbytes"] / scored["nbytes_full"] == pytest.approx(scored["bytes_ratio"])
    assert 0.24 < scored["bytes_ratio"] < 0.6
    # With the answer on top of what the prompt keeps.
    assert 0.25 < record["generation"]["kept_mean"] < 0.35
    assert "rolling" not in record


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "snapvk", "budget": 64}, "did you mean 'snapkv'"),
        ({"method": "snapkv:windw=8", "budget": 64}, "has no option 'windw'"),
        ({"method": "snapkv", "budget": "many"}, "cannot read 'many'"),
        ({"method": "snapkv", "budget": 1.5}, "at most 1.0"),
        ({"method": "snapkv", "budget": 8}, "raise it to at least"),
        ({"method": "snapkv"}, "needs a budget"),
        ({"method": "full", "budget": 64}, "takes no budget"),
        ({"method": "full", "truncation": True}, "truncation= does not go with"),
        ({"method": "full", "mixed_precision_dtype": "float16"}, "with dtype="),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(kvfold.KvfoldError, match=re.escape(message)):
        KvfoldLM("bundled", device="cpu", **options)


@pytest.mark.parametrize(
    ("method", "budget", "message"),
    [("snapkv", 64, "evicts while decoding"), ("h2o", 0.5, "in tokens or bytes")],
)
def test_perplexity_that_would_be_the_full_caches_is_refused(method, budget, message):
    with pytest.raises(kvfold.KvfoldError, match=message):
        compressed(method, budget).loglikelihood_rolling(pairs(("The sky is blue.",)), True)


def test_continuations_that_would_meet_a_full_cache_are_refused():
    with pytest.raises(kvfold.KvfoldError, match="choose a variant"):
        compressed("simlayerkv:when=first_decode").loglikelihood(pairs(("The sky", " is")), True)


@pytest.mark.parametrize(("context", "after"), itertools.product(range(1, 8), range(1, 6)))
def test_a_split_reads_and_asks_what_one_forward_would_read(context, after):
    first, then = list(range(context)), list(range(100, 100 + after))
    split = ScoringSplit.of(first, then, 6)
    assert list(split.prefill + split.scored_input) == (first + then)[-7:][:-1]
    assert list(split.continuation) == then and len(split.scored_input) == after
    assert split.truncated == max(0, context + after - 7)


@pytest.mark.parametrize(
    ("context", "after", "message"), [([], [1], "at least one"), ([1], [2] * 9, "does not fit")]
)
def test_a_split_that_cannot_be_is_refused(context, after, message):
    with pytest.raises(kvfold.KvfoldError, match=message):
        ScoringSplit.of(context, after, 6)


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvfold.eval.lm_eval", *map(str, arguments)])
    program.main()


@pytest.mark.slow
def test_the_program_writes_the_record(tasks, tmp_path, monkeypatch, capsys):
    # The harness's own thousands of tasks take seconds to list.
    local = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", local)
    told = 'pretrained=bundled,method="snapkv:window=8,kernel=5",budget=20%'
    command(
        monkeypatch,
        *("--model", "kvfold", "--model_args", told, "--device", "cpu", "--tasks", "choice"),
        *("--include_path", tasks, "--output_path", tmp_path, "--limit", 2),
    )
    assert "|choice|" in capsys.readouterr().out
    (path,) = tmp_path.rglob("results_*.json")
    record = json.loads(path.read_text())["config"]["kvfold"]
    assert record["budget"] == "0.2 of the tokens seen"
    assert "window=8,kernel=5" in record["method"]
    assert record["log_likelihood"]["caches"] == 2


def refusal(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--model", "kvfold")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_program_ends_a_refusal_with_one_line(monkeypatch, capsys):
    def refuse():
        KvfoldLM("bundled", method="nothing")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    assert refusal(monkeypatch, capsys).startswith("error: unknown method 'nothing'")


def test_the_program_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "kvfold.eval.lm_eval.model")
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    assert refusal(monkeypatch, capsys).endswith("pip install 'kvfold[lm_eval]'")
