#!/usr/bin/env bash
# Eight methods on two models, at a fifth of the cache, before and after the question is known:
#
#     docs/results/two_models/run.sh BOOK [FOLDER]
#
# BOOK is a plain text (Project Gutenberg's 84): needles are hidden in it. The models are those of
# `make real` and `make real REAL=gemma3`, with the scorers of `make fits` that zap reads. Ten samples
# of each cell run first; then the minutes of the other thirty are printed. Samples are kept in FOLDER;
# run again, it goes on where it stopped. MODELS=gemma3, TASKS=needle_paraphrased, VIEWS=aware,
# METHODS=kvzip,snapkv and SAMPLES=10 run a part, LENGTH=2048 longer texts, BUDGETS=0.4,0.8 other
# sizes. TEXTS=FOLDER, that of `python benchmarks/texts.py FOLDER`, adds needles in eight languages.
# Records name the commit, so nothing may be uncommitted when it begins.
# `python -m docs.generate.two_models FOLDER` makes the pages, also while it runs.
set -eu
book=$1 out=${2:-kvfold-two-models} root=$(cd "$(dirname "$0")/../../.." && pwd)
if [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi

agnostic="" aware=--question-aware

run() {
    local model=$1 samples=$2 view
    local tasks=${TASKS:-ruler_niah_single_1,ruler_niah_single_2,needle_paraphrased}
    local methods=${METHODS:-full,recall,kvzip,zap:file=.models/$model-scorer.safetensors,snapkv,\
pyramidkv,h2o,d2o,streaming_llm}
    for view in ${VIEWS:-agnostic aware}; do
        kvfold eval --model ".models/$model" --tasks "$tasks" --methods "$methods" \
            --budgets "${BUDGETS:-0.2}" --lengths "${LENGTH:-1024}" --haystack "$book" \
            --answer-tokens 16 --batch-size 10 --samples "$samples" --workers "${WORKERS:-1}" \
            --out "$out" ${!view}
    done
}

alone() {
    kvfold eval --model ".models/$1" --tasks "$2" --methods full --budgets "" --lengths 1024 --samples 10 \
        --batch-size 10 --workers "${WORKERS:-1}" --out "$out" ${3:+--haystack "$3"}
}

# What the full cache answers of other tasks, ten samples each.
if [ -z "${TASKS:-}" ]; then
    for model in ${MODELS:-smollm2 gemma3}; do
        alone "$model" needle_replaced,needle_two_hops
        [ -z "${TEXTS:-}" ] || alone "$model" languages "$TEXTS"
    done
fi
# KVzip otherwise, and with recall, where it fails.
if [ -z "${TASKS:-}${METHODS:-}" ] && [[ ${MODELS:-gemma3} == *gemma3* ]]; then
    METHODS="kvzip_plus,kvzip:level=uniform,kvzip:score=rms,floor=0.25,kvzip + recall,snapkv + recall" \
        TASKS=ruler_niah_single_2 VIEWS=agnostic run gemma3 10
    METHODS=kvzip BUDGETS=0.5,0.8 TASKS=ruler_niah_single_2 VIEWS=agnostic run gemma3 10
fi
# A first batch of each cell tells how long the others take.
SECONDS=0
for model in ${MODELS:-smollm2 gemma3}; do run "$model" 10; done
echo "about $((SECONDS * 3 / 60)) minutes to go"
for model in ${MODELS:-smollm2 gemma3}; do run "$model" "${SAMPLES:-40}"; done
