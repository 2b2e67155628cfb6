#!/usr/bin/env bash
# All published results of the bundled model, from the samples to docs/results/bundled:
#
#     docs/results/bundled/run.sh BOOK [FOLDER]
#
# BOOK is a text that the model was not trained on (Project Gutenberg's 84, 1661 or 35): needles are
# hidden in it, and it is continued. Samples are kept in FOLDER; run again, it goes on where it
# stopped. Every method of a comparison meets the same tasks. Records name the commit, so nothing may
# be uncommitted when it begins.
set -eu
book=$1 out=${2:-kvfold-leaderboard}
root=$(cd "$(dirname "$0")/../../.." && pwd)
if [ ! -d "$out" ] && ! git -C "$root" diff --quiet HEAD; then
    echo "commit first: records name the commit that they were made at" >&2
    exit 1
fi
run() {
    local comparison=$1
    shift
    kvfold eval --out "$out/$comparison" --haystack "$book" "$@"
}

# What the bundled model masters with a full cache.
needles=ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_multivalue
needles=$needles,ruler_niah_multiquery
budgets=0.5,0.2,0.1,0.05
with_budget="local_window,streaming_llm_original,knorm,tova,h2o,roco,cam,snapkv,pyramidkv,adakv"
with_budget="$with_budget,pyramidkv + adakv,d2o,h2o + merge,kvzip,kvzip:level=uniform,snapkv + kivi"
# SimLayerKV's window is an eighth of the length, as its 1024 is of the 8 k of its models.
without="full,kivi,kivi:bits=2,think,minicache,pyramidinfer,dbudgetkv,auto,auto:tolerance=0.2"
without="$without,simlayerkv:window=128"
all="$without,$with_budget"

run leaderboard --tasks $needles --methods "$all" --budgets $budgets --lengths 1024 --samples 20
run leaderboard --tasks niah_magic --methods "$all" --budgets $budgets --lengths 512,1024,2048 \
    --samples 11
run leaderboard --tasks continuation --methods "$all" --budgets $budgets --lengths 1024 \
    --samples 16 --data "$book"
run leaderboard --tasks $needles --methods "$all" --budgets 0.2,0.1 --lengths 1024 --samples 10 \
    --question-aware

# What it does not master: copying UUIDs.
run uuids --tasks kv_retrieval --methods full --budgets 0.5 --lengths 1024 --samples 20

# Token by token, for the methods that evict while they decode.
run streaming --tasks perplexity --methods "local_window,streaming_llm_original,h2o,tova,roco,cam,d2o" \
    --budgets 0.5,0.2,0.1 --lengths 512 --samples 6 --data "$book"

# The papers' own ablations, at this scale.
d2o=d2o,d2o_official,d2o:merge=none,d2o:merge=average,d2o:similarity=values
for allocation in uniform reciprocal exponential; do d2o=$d2o,d2o:allocation=$allocation; done
run d2o --tasks $needles --methods "$d2o" --budgets 0.5,0.2 --lengths 1024 --samples 20

lazy=simlayerkv:window=128
for threshold in 0.5 0.7 0.95 0.99; do lazy="$lazy,simlayerkv:window=128,threshold=$threshold"; done
for other in random random_bottom random_top pyramid; do
    lazy="$lazy,simlayerkv:window=128,strategy=$other"
done
run simlayerkv --tasks $needles --methods "$lazy" --budgets 0.5 --lengths 1024 --samples 20

norm=dbudgetkv,dbudgetkv_literal
for threshold in 0.001 0.05 0.1 0.3; do norm=$norm,dbudgetkv:threshold=$threshold; done
norm="$norm,dbudgetkv:threshold=0.05,ranking=attention,dbudgetkv:threshold=0.01,ranking=attention"
run dbudgetkv --tasks $needles --methods "$norm" --budgets 0.5 --lengths 1024 --samples 20

run pyramidkv --tasks $needles --methods "pyramidkv,snapkv" --budgets 64,128,256,512,1024 \
    --lengths 2048 --samples 10 --question-aware

# Pages, tables, records and samples into docs/results/bundled.
docs=$root/docs/results/bundled
publish() {
    local comparison=$1 folder=$2
    kvfold report "$out/$comparison" --out "$out/pages/$comparison"
    mkdir -p "$folder"
    cp "$out/$comparison/records.jsonl" "$out/pages/$comparison/report.md" "$folder"
    python "$root/docs/generate/compact_samples.py" "$out/$comparison" "$folder/samples.csv.gz"
}
publish leaderboard "$docs"
cp "$out"/pages/leaderboard/{tasks.md,*.png} "$docs"
for comparison in uuids streaming d2o simlayerkv dbudgetkv pyramidkv; do
    publish $comparison "$docs/$comparison"
done
