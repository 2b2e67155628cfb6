#!/usr/bin/env bash
# torch 2.13.0 (CPU, Python 3.11): a TorchDispatchMode that looks for numbers that a decode step reads back to the
# host, as a CUDA graph forbids, sees item(), bool() and int() as aten._local_scalar_dense, but nothing at all of
# tolist() and cpu(), only a detach of numpy(), and index.Tensor, no nonzero, of an index by a mask. A step that is
# clean by such a mode on a CPU may still wait for the device at each of these.
# Output seen:
#   item: select.int _local_scalar_dense.default
#   bool: gt.Scalar any.default _local_scalar_dense.default
#   tolist:
#   cpu:
#   numpy: detach.default
#   mask: gt.Scalar index.Tensor
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/readbacks.py" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


lengths = torch.arange(4.0)
readings = {
    "item": lambda: lengths[0].item(),
    "bool": lambda: bool((lengths > 5).any()),
    "tolist": lambda: lengths.tolist(),
    "cpu": lambda: lengths.cpu(),
    "numpy": lambda: lengths.numpy(),
    "mask": lambda: lengths[lengths > 2],
}
for name, reading in readings.items():
    with Watch() as watch:
        reading()
    print(f"{name}:", *watch.seen)
PYTHON

"$folder/venv/bin/python" "$folder/readbacks.py" | sed 's/ *$//' > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
item: select.int _local_scalar_dense.default
bool: gt.Scalar any.default _local_scalar_dense.default
tolist:
cpu:
numpy: detach.default
mask: gt.Scalar index.Tensor
SEEN
