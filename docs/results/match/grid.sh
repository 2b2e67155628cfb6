#!/bin/sh
# Records of docs/results/match/README.md: docs/results/match/grid.sh MODEL SCORER OUT.jsonl BOOK...
# Two passages of each book for the methods that the page compares, one for all others. Stopped, it
# goes on where it was. `python -m docs.generate.match_page` then makes tables and picture.
set -eu
model=$1 scorer=zap:file=$2 out=$3
shift 3
rms=kvzip:score=rms,floor=0.25 questions=benchmarks/questions

grid() { python -m docs.results.match.measure "$model" "$out" "$@"; }

core() {
  grid "$@" --method kvzip --method "kvzip + match" --method "$rms" --method "$rms + match"
}

core "$@"
core "$@" --passages 2
grid "$@" \
  --method "$rms + match:bias=head" --method "$rms + match:references=text" \
  --method "kvzip + match:on_policy=true" --method "$rms + match:on_policy=true" \
  --method "kvzip + match:bias=head" --method "kvzip + match:references=text" \
  --method kvzip_plus --method "kvzip_plus + match" --method "kvzip_plus + match:bias=head" \
  --method "kvzip_plus + match:references=text" --method "kvzip_plus + kivi:bits=4" \
  --method "kvzip_plus + turboquant_4bit" --method "kvzip_plus + turboquant_3bit" \
  --method "kvzip + kivi:bits=4" --method "kvzip + turboquant_4bit" \
  --method "kvzip + turboquant_3bit" --method snapkv --method "snapkv + match" \
  --method "$scorer" --method "$scorer + match" \
  --method "kvzip + recent" --method "$rms + recent" --method "$rms + recent + match" \
  --method "kvzip:questions=$questions/general.txt" \
  --method "kvzip:questions=$questions/general.txt + match" \
  --method "kvzip:questions=$questions/needles.txt" \
  --method "kvzip:questions=$questions/needles.txt + match" \
  --method "kvzip:questions=$questions/needles_begun.txt" \
  --method "kvzip:questions=$questions/needles_begun.txt + match"
