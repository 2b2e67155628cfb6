#!/usr/bin/env bash
# zstandard 0.25.0 (Python binding), numpy: bfloat16 keys and values are stored as two byte planes, the
# signs and exponents, which compress, and the mantissas, which do not. Both planes in one frame at
# level 3 give a larger file than a frame for each plane at level 1, although the level is higher.
# Two effects add up: a frame of both planes is larger than two frames at the same level (60601 against
# 53438 bytes at level 1), and the exponents alone are larger at level 3 than at level 1 (16326, 15028).
# Output seen:
#   76800 bytes: one frame 1.306, a frame each 1.437
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zstandard==0.25.0 numpy==2.2.6

"$folder/venv/bin/python" - <<'PYTHON'
import numpy
import zstandard


def packed(data, level):
    return len(zstandard.ZstdCompressor(level=level).compress(data))


# 600 keys of a head of size 64, normal with a standard deviation per channel, as bfloat16.
draw = numpy.random.default_rng(0)
keys = draw.normal(size=(600, 64)) * draw.lognormal(sigma=0.5, size=64)
halves = (keys.astype(numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)
low, high = (halves & 255).astype(numpy.uint8).tobytes(), (halves >> 8).astype(numpy.uint8).tobytes()

size = len(low) + len(high)
together, apart = packed(low + high, 3), packed(low, 1) + packed(high, 1)
print(f"{size} bytes: one frame {size / together:.3f}, a frame each {size / apart:.3f}")
assert zstandard.ZstdDecompressor().decompress(zstandard.ZstdCompressor(level=1).compress(high)) == high
assert together > 1.05 * apart
PYTHON
