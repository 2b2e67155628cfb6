#!/usr/bin/env bash
# The leaderboard of a really trained model, from the samples to their records:
#
#     docs/results/run.sh BOOK [FOLDER] [MODEL]
#
# BOOK is a plain text (Project Gutenberg's 84): needles are hidden in it. MODEL is a transformers
# folder; by default .models/smollm2, which `make real` makes, with files that zap, qfilter, duo and
# curve read.
# TEXTS, a folder of other plain texts, and LONGBENCH, one of LongBench's rows, add their steps.
# Samples are kept in FOLDER; run again, it goes on where it stopped. STEPS="needles uuids" runs these
# steps only, METHODS=kvzip,snapkv these methods beside the baselines. Records name the commit, so
# nothing may be uncommitted when it begins. One worker takes about WORKERS=1 core. PLAN=1 prints the
# commands and runs none; `python -m docs.generate.real_left BOOK FOLDER` prints what the published
# records lack. `python -m docs.generate.publish_real FOLDER` makes the pages, also while it runs, and
# `python -m docs.results.reproduce MODEL BOOK` runs three of the published cells again.
set -eu
book=$1 out=${2:-kvfold-real} root=$(cd "$(dirname "$0")/../.." && pwd)
model=${3:-$root/.models/smollm2}
if [ -z "${PLAN:-}" ] && [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi

zap= fits= fitted=.models/smollm2
made() { [ -n "${PLAN:-}" ] || [ -f "$fitted-$1.safetensors" ]; }
if made scorer; then
    zap=,zap:file=$fitted-scorer.safetensors
    fits=$zap,zap_threshold:file=$fitted-scorer.safetensors
fi
if made filters; then fits=$fits,qfilter:file=$fitted-filters.safetensors; fi
if made heads; then
    for preset in duo duo_paper duo_official; do fits="$fits,$preset:file=$fitted-heads.safetensors"; done
fi
if made curve; then fits="$fits,snapkv + curve:file=$fitted-curve.safetensors"; fi

# SimLayerKV's window is an eighth of the shortest texts, as its 1024 is of the 8 k of its models.
lazy="simlayerkv:window=128"

# All methods and presets.
all() {
    local preset
    for preset in llama2 llama3 mistral qwen; do lazy="$lazy,simlayerkv_$preset:window=128"; done
    echo "full,kivi,kivi:bits=4,think,minicache,pyramidinfer,auto,dbudgetkv,dbudgetkv_literal,$lazy,\
snapkv,snapkv_official,snapkv_kvpress,pyramidkv,pyramidkv_official,adakv,pyramidkv + adakv,\
d2o,d2o_official,h2o,h2o + merge,cam,roco,kvzip,kvzip:level=uniform,tova,keydiff,knorm,cur,dropkv,\
chunkkv,local_window,streaming_llm_original,snapkv + kivi:bits=4,kvzip_plus,expected_attention,\
expected_attention_ada,compactor,compactor_official,lagkv,criticalkv_summed,leverage,non_causal,nacl,finch,\
rkv,scissorhands,turboquant,turboquant_3bit,snapkv + turboquant,kvzip + turboquant,\
kvzip + kivi:bits=4,kvzip:score=rms,floor=0.25,kvzip + match,kvzip:score=rms,floor=0.25 + match,\
snapkv + match,kvzip:demote=0.25,rkv_official,scissorhands_kvcf,snapkv_decode,sirllm,\
finch_kvpress,lagkv_kvpress,lagkv_official,knorm + chunkwise,kvzip + level,snapkv + reindex,kvzip + recent,\
snapkv + criticalkv_summed + adakv,simlayerkv:window=128 + snapkv,\
turboquant_4bit,turboquant_k8v4,turboquant_k3v4,\
recall,recall:read=0.01,recall:read=0.02,recall:read=0.1,recall:read=0.02,keys=1,recall:read=0.02,keys=3,\
snapkv + recall:read=0.02$fits"
}

# The best of each kind, for the steps that take long.
best() {
    echo "full,dbudgetkv,$lazy,snapkv,pyramidkv,pyramidkv + adakv,d2o,h2o,\
recall,recall:read=0.02,kvzip,kvzip:level=uniform,keydiff,compactor,expected_attention$zap"
}

# Those of the picture that find most, for the longest texts.
leading() {
    echo "full,recall:read=0.02,kvzip,compactor,keydiff,snapkv,pyramidkv$zap"
}

# A step runs before the question is known and with the question in view, unless `views` says so.
# Answers end at the tokens that a right one takes, so that wrong ones, which go on, take no more
# time.
agnostic="" aware=--question-aware
budgets=0.5,0.3,0.2,0.1,0.05 samples=40 batch=10
views="agnostic aware"
step() {
    local name=$1 view
    shift
    case " ${STEPS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    for view in $views; do
        run kvfold eval --model "$model" --methods "${METHODS:-$methods}" --budgets $budgets \
            --samples $samples --batch-size $batch --workers "${WORKERS:-1}" --out "$out" ${!view} "$@"
    done
}
run() {
    if [ -n "${PLAN:-}" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}

needles=ruler_niah_single_1,ruler_niah_single_2
hidden=(--haystack "$book" --answer-tokens 16)
methods=$(all) step needles "${hidden[@]}" --tasks $needles --lengths 1024
for text in "$book" ${TEXTS:+"$TEXTS"/*}; do
    methods=$(best) views=agnostic samples=20 step texts --tasks continuation --lengths 512 \
        --data "$text"
done
methods=$(best) views=agnostic budgets=0.3,0.2,0.1 step recall "${hidden[@]}" \
    --tasks profile_form --lengths 1024
methods=$(best) views=agnostic budgets=0.2,0.1 step turns "${hidden[@]}" \
    --tasks profile_conversation --lengths 1024
methods=$(best) budgets=0.2,0.1 step longer "${hidden[@]}" --tasks $needles --lengths 2048
# The full cache answers three of four only: one view is enough.
methods=$(best) views=agnostic budgets=0.3,0.2,0.1 step uuids --haystack "$book" \
    --tasks ruler_niah_single_3 --lengths 1024 --answer-tokens 48
for length in 4096 7168; do
    methods=$(leading) budgets=0.2 samples=20 batch=4 step far "${hidden[@]}" \
        --tasks ruler_niah_single_1 --lengths $length
done
if [ -n "${LONGBENCH:-}" ]; then
    shots=longbench_trec,longbench_triviaqa,longbench_samsum
    methods=$(best) budgets=0.2,0.1 batch=4 step shots --tasks $shots --data "$LONGBENCH" \
        --max-length 7680
fi
