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
# sizes. Records name the commit, so nothing may be uncommitted when it begins.
# `python -m docs.generate.two_models FOLDER` makes the pages, also while it runs.
set -eu
book=$1 out=${2:-kvfold-two-models} root=$(cd "$(dirname "$0")/../../.." && pwd)
if [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi
tasks=${TASKS:-ruler_niah_single_1,ruler_niah_single_2,needle_paraphrased}

agnostic="" aware=--question-aware

run() {
    local model=$1 samples=$2 view
    local methods=${METHODS:-full,recall,kvzip,zap:file=.models/$model-scorer.safetensors,snapkv,\
pyramidkv,h2o,d2o,streaming_llm}
    for view in ${VIEWS:-agnostic aware}; do
        kvfold eval --model ".models/$model" --tasks "$tasks" --methods "$methods" \
            --budgets "${BUDGETS:-0.2}" --lengths "${LENGTH:-1024}" --haystack "$book" \
            --answer-tokens 16 --batch-size 10 --samples "$samples" --workers "${WORKERS:-1}" \
            --out "$out" ${!view}
    done
}

# What the full cache answers of other tasks, ten samples each.
if [ -z "${TASKS:-}" ]; then
    for model in ${MODELS:-smollm2 gemma3}; do
        kvfold eval --model ".models/$model" --tasks needle_replaced,needle_two_hops,languages \
            --methods full --budgets "" --lengths 1024 --samples 10 --batch-size 10 \
            --workers "${WORKERS:-1}" --out "$out"
    done
fi
# A first batch of each cell tells how long the others take.
for model in ${MODELS:-smollm2 gemma3}; do run "$model" 10; done
echo "about $((SECONDS * 3 / 60)) minutes to go"
for model in ${MODELS:-smollm2 gemma3}; do run "$model" "${SAMPLES:-40}"; done
