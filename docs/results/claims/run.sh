#!/usr/bin/env bash
# The records behind docs/claims.md, on a really trained model:
#
#     docs/results/claims/run.sh BOOK BOOKS [FOLDER] [MODEL]
#
# BOOK is a plain text (Project Gutenberg's 84): needles are hidden in it, and it is continued. BOOKS
# is a folder of such texts, whose passages the step "layers" reads. MODEL is a transformers folder
# (default .models/smollm2, which `make real` makes). Samples are kept in FOLDER; run again, it goes
# on where it stopped, and STEPS="layers kvzip" runs these steps only. A step's records are published
# into docs/results/claims when it ends. SAMPLES=1 tries a step with one sample, and publishes
# nothing. One worker takes about WORKERS=1 core. Records name the commit, so nothing may be
# uncommitted when it begins.
set -eu
book=$1 books=$2 out=${3:-kvfold-claims} root=$(cd "$(dirname "$0")/../../.." && pwd)
model=${4:-$root/.models/smollm2} docs=$root/docs/results/claims
if [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi

wanted() { case " ${STEPS:-$1} " in *" $1 "*) return 0 ;; *) return 1 ;; esac }

# One step: its name, the samples of each task, and the options of `kvfold eval`.
step() {
    local name=$1 samples=${SAMPLES:-$2}
    wanted "$name" || return 0
    shift 2
    kvfold eval --model "$model" --haystack "$book" --samples "$samples" --batch-size 20 \
        --workers "${WORKERS:-1}" --out "$out/$name" "$@"
    [ -z "${SAMPLES:-}" ] || return 0
    mkdir -p "$docs/$name"
    # The model's folder stays on the machine.
    sed 's|"name":"[^"]*/|"name":"|' "$out/$name/records.jsonl" >"$docs/$name/records.jsonl"
    python "$root/docs/generate/compact_samples.py" "$out/$name" "$docs/$name/samples.csv.gz"
}

# Core hours after each step: those of one sample of every cell, times the samples.
if wanted layers; then # 0.1
    python "$root/docs/results/claims/measure_layers.py" "$model" "$books" "$docs/layers" --passages 2
fi

needles=ruler_niah_single_1,ruler_niah_single_2

step pyramidkv-small 40 --tasks $needles --methods "pyramidkv,snapkv:window=8" --budgets 16,32 \
    --lengths 1024 --answer-tokens 16 --question-aware
pyramid="pyramidkv,pyramidkv_official,snapkv"
for beta in 1 10 40; do pyramid="$pyramid,pyramidkv:beta=$beta"; done
for window in 16 32; do pyramid="$pyramid,pyramidkv:window=$window"; done
step pyramidkv 40 --tasks $needles --methods "$pyramid" --budgets 128,256,512 \
    --lengths 1024 --answer-tokens 16 --question-aware

zip="kvzip,kvzip:level=uniform"
step kvzip 40 --tasks $needles --methods "$zip,snapkv,pyramidkv,h2o" --budgets 0.5,0.3,0.2,0.1 \
    --lengths 1024 --answer-tokens 16
step kvzip-questions 40 --tasks profile_form --methods "$zip,snapkv,h2o" --budgets 0.5,0.3,0.2 \
    --lengths 512 --answer-tokens 16

d2o="d2o,h2o"
for merge in none average; do d2o="$d2o,d2o:merge=$merge"; done
for similarity in values independent; do d2o="$d2o,d2o:similarity=$similarity"; done
for shape in uniform reciprocal exponential; do d2o="$d2o,d2o:allocation=$shape"; done
for beta in 0.5 0.9; do d2o="$d2o,d2o:beta=$beta"; done
for recent in 0.5 0.75; do d2o="$d2o,d2o:recent=$recent"; done
# These losses are means over hundreds of tokens, which bfloat16 gives in half the time.
step d2o 60 --tasks perplexity --methods "$d2o" --budgets 0.2 --lengths 512 \
    --data "$book" --dtype bfloat16
step d2o-prompt 60 --tasks continuation --methods "$d2o" --budgets 0.2,0.1 --lengths 1024 \
    --data "$book" --dtype bfloat16

# SimLayerKV's window is an eighth of the length, as its 1024 is of the 8 k of its models.
lazy="simlayerkv:window=128,simlayerkv:window=128 + kivi,kivi"
lazy="$lazy,simlayerkv:window=128,when=first_decode"
for threshold in 0.2 0.5 0.6 0.7 0.8 0.95 0.99; do
    lazy="$lazy,simlayerkv:window=128,threshold=$threshold"
done
for other in random random_bottom random_top pyramid; do
    lazy="$lazy,simlayerkv:window=128,strategy=$other"
done
step simlayerkv 40 --tasks $needles --methods "$lazy" --budgets 0.5 --lengths 1024 \
    --answer-tokens 16 --question-aware # 0.6
first="simlayerkv:window=128,when=first_decode"
step simlayerkv-first 40 --tasks $needles --methods "$first,$first + kivi" --budgets 0.5 \
    --lengths 1024 --answer-tokens 16 --question-aware

step dbudgetkv-kept 20 --tasks ruler_cwe,ruler_fwe --methods dbudgetkv --budgets 0.5 \
    --lengths 1024 --answer-tokens 1 --question-aware # 0.05
norm="dbudgetkv,dbudgetkv_literal,dbudgetkv:keep_layers=none,dbudgetkv:rows=10"
norm="$norm,dbudgetkv:ranking=attention,dbudgetkv:threshold=0.0001,ranking=attention"
for threshold in 0.001 0.05 0.1 0.3; do norm="$norm,dbudgetkv:threshold=$threshold"; done
step dbudgetkv 40 --tasks $needles --methods "$norm" --budgets 0.5 --lengths 1024 \
    --answer-tokens 16 --question-aware # 0.5
