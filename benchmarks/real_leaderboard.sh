#!/usr/bin/env bash
# The leaderboard of a really trained model, from the samples to their records:
#
#     benchmarks/real_leaderboard.sh BOOK [FOLDER] [MODEL]
#
# BOOK is a plain text (Project Gutenberg's 84): needles are hidden in it. MODEL is a transformers
# folder (default .models/smollm2, which `make real` makes). Samples are kept in FOLDER; run again, it
# goes on where it stopped, and STEPS="needles uuids" runs these steps only. Records name the commit,
# so nothing may be uncommitted when it begins. One worker takes about WORKERS=1 core. PLAN=1 prints
# the commands and runs none. `publish_real.py FOLDER` makes the pages, also while it runs.
set -eu
book=$1 out=${2:-kvfold-real} root=$(cd "$(dirname "$0")/.." && pwd)
model=${3:-$root/.models/smollm2}
if [ -z "${PLAN:-}" ] && [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi

# SimLayerKV's window is an eighth of the length, as its 1024 is of the 8 k of its models.
lazy="simlayerkv:window=128"
for preset in llama2 llama3 mistral qwen; do lazy="$lazy,simlayerkv_$preset:window=128"; done
whole="full,kivi,kivi:bits=4,think,minicache,pyramidinfer,auto,dbudgetkv,dbudgetkv_literal,$lazy"
window="snapkv,snapkv_official,snapkv_kvpress,pyramidkv,pyramidkv_official,adakv,pyramidkv + adakv"
sums="d2o,d2o_official,h2o,h2o + merge,cam,roco"
other="kvzip,kvzip:level=uniform,tova,keydiff,knorm,cur,dropkv,chunkkv,local_window"
other="$other,streaming_llm_original,snapkv + kivi:bits=4"
methods="$whole,$window,$sums,$other"

# Each step runs before the question is known and with the question in view. Answers end at the
# tokens that a right one takes, so that wrong ones, which go on, take no more time.
step() {
    local name=$1
    shift
    case " ${STEPS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    for view in "" --question-aware; do
        ${PLAN:+echo} kvfold eval --model "$model" --haystack "$book" --methods "$methods" \
            --budgets 0.5,0.3,0.2,0.1,0.05 --samples 40 --batch-size 20 \
            --workers "${WORKERS:-1}" --out "$out" $view "$@"
    done
}

needles=ruler_niah_single_1,ruler_niah_single_2
step needles --tasks $needles --lengths 1024 --answer-tokens 16
step uuids --tasks ruler_niah_single_3 --lengths 1024 --answer-tokens 48
step longer --tasks $needles --lengths 2048 --answer-tokens 16
