#!/usr/bin/env bash
# The leaderboard of the bundled model: benchmarks/leaderboard.sh BOOK FOLDER
#
# BOOK is a text that the model was not trained on (Project Gutenberg's 84, 1661 or 35). Run again,
# it goes on where it stopped; then: kvfold report FOLDER --out docs/results
set -eu
book=$1 out=$2
run() { kvfold eval --out "$out" "$@"; }

# What the bundled model masters with a full cache; it cannot copy UUIDs, so that is shown once.
needles=ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_multivalue
needles=$needles,ruler_niah_multiquery
budgets=0.5,0.2,0.1,0.05
with_budget="local_window,streaming_llm_original,knorm,tova,h2o,roco,cam,snapkv,pyramidkv,adakv"
with_budget="$with_budget,pyramidkv + adakv,d2o,h2o + merge,kvzip,kvzip:level=uniform,snapkv + kivi"
# SimLayerKV's window is an eighth of the length, as its 1024 is of the 8 k of its models.
without="full,kivi,kivi:bits=2,think,minicache,pyramidinfer,dbudgetkv,auto,auto:tolerance=0.2"
without="$without,simlayerkv:window=128"

run --tasks $needles --methods "$without,$with_budget" --budgets $budgets --lengths 1024 --samples 20
run --tasks niah_magic --methods "$without,$with_budget" --budgets $budgets \
    --lengths 512,1024,2048 --samples 11
run --tasks continuation --methods "$without,$with_budget" --budgets $budgets --lengths 1024 \
    --samples 16 --data "$book"
run --tasks kv_retrieval --methods full --budgets 0.5 --lengths 1024 --samples 20

# Token by token, for the methods that evict while they decode.
run --tasks perplexity --methods "local_window,streaming_llm_original,h2o,tova,roco,cam,d2o" \
    --budgets 0.5,0.2,0.1 --lengths 512 --samples 6 --data "$book"

# With the question in view.
run --tasks $needles --methods "$without,$with_budget" --budgets 0.2,0.1 --lengths 1024 \
    --samples 10 --question-aware

# The papers' own ablations, at this scale.
d2o=d2o,d2o_official,d2o:merge=none,d2o:merge=average,d2o:similarity=values
for allocation in uniform reciprocal exponential; do d2o=$d2o,d2o:allocation=$allocation; done
run --tasks $needles --methods "$d2o" --budgets 0.5,0.2 --lengths 1024 --samples 20
lazy=simlayerkv:window=128
for threshold in 0.5 0.7 0.95 0.99; do lazy="$lazy,simlayerkv:window=128,threshold=$threshold"; done
for other in random random_bottom random_top pyramid; do
    lazy="$lazy,simlayerkv:window=128,strategy=$other"
done
norm=dbudgetkv,dbudgetkv_literal
for threshold in 0.001 0.05 0.1 0.3; do norm=$norm,dbudgetkv:threshold=$threshold; done
norm="$norm,dbudgetkv:threshold=0.05,ranking=attention,dbudgetkv:threshold=0.01,ranking=attention"
run --tasks $needles --methods "$lazy,$norm" --budgets 0.5 --lengths 1024 --samples 20
run --tasks $needles --methods "pyramidkv,snapkv" --budgets 64,128,256,512,1024 --lengths 2048 \
    --samples 10 --question-aware
