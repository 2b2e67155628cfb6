# SPDX-License-Identifier: Apache-2.0
"""Rotation and codebooks of TurboQuant: rotated coordinates look Gaussian, one table fits them all.

Zandieh et al., arXiv 2504.19874.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

# Upper half of the Lloyd–Max centroids of a unit Gaussian, by bits; the lower half mirrors it.
UPPER = {
    1: (0.7978845608028654,),
    2: (0.45278003463649201, 1.5104176084990954),
    3: (0.24509417894422167, 0.75600528120587727, 1.3439092785049999, 2.1519457045369873),
    4: (
        0.12839502985114701,
        0.3880482994902902,
        0.65675911853246338,
        0.94234045648696137,
        1.2562311973471772,
        1.6180463860218826,
        2.0690172265313866,
        2.7325895709951631,
    ),
}
# Widths of the planes that a code is cut into, lowest bits first: each fills bytes.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}


@lru_cache(maxsize=64)
def centroids(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Centroids `[2^bits]` of a unit Gaussian, ascending."""
    upper = torch.tensor(UPPER[bits], dtype=torch.float64)
    return torch.cat([-upper.flip(0), upper]).to(device, dtype)


def looked_up(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Centroids of codes, in the shape of `codes`."""
    table = centroids(bits, dtype, codes.device)
    # Indexing with the codes themselves takes three times as long.
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


@lru_cache(maxsize=64)
def boundaries(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Midpoints `[2^bits − 1]` of neighbouring centroids."""
    exact = centroids(bits, torch.float64, torch.device("cpu"))
    return ((exact[1:] + exact[:-1]) / 2).to(device, dtype)


def nearest(numbers: Tensor, bits: int) -> Tensor:
    """Code of the nearest centroid, uint8; on a boundary the upper one."""
    edges = boundaries(bits, numbers.dtype, numbers.device)
    return torch.bucketize(numbers, edges, right=True, out_int32=True).to(torch.uint8)


def rotated(rows: Tensor) -> Tensor:
    """Rows `[…, D]` by an orthonormal matrix: Sylvester's Hadamard matrix for a power of two.

    Otherwise its Kronecker product with the discrete cosine transform of D's odd factor. A row's
    result does not depend, in any bit, on the rows beside it.
    """
    return _by_hadamard(_by_cosines(rows, back=False))


def rotated_back(rows: Tensor) -> Tensor:
    """Inverse of `rotated`."""
    return _by_cosines(_by_hadamard(rows), back=True)


@lru_cache(maxsize=64)
def rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix `[size, size]` of `rotated`."""
    return rotated(torch.eye(size, dtype=torch.float64)).T.contiguous().to(device, dtype)


def _by_hadamard(rows: Tensor) -> Tensor:
    """Rows `[…, p·m]`, m odd, by the Hadamard matrix of size p over runs of m channels."""
    size, odd = rows.shape[-1], _odd_factor(rows.shape[-1])
    turned, run = rows, odd
    while run < size:
        one, other = turned.unflatten(-1, (-1, 2, run)).unbind(-2)
        turned = torch.stack([one + other, one - other], -2).flatten(-3)
        run *= 2
    return turned * math.sqrt(odd / size)


def _by_cosines(rows: Tensor, back: bool) -> Tensor:
    """Each run of D's odd factor by its discrete cosine transform, or `back` by the inverse."""
    odd = _odd_factor(rows.shape[-1])
    if odd == 1:
        return rows
    matrix = _cosines(odd).T if back else _cosines(odd)
    runs = rows.unflatten(-1, (-1, odd)).unbind(-1)
    sums = [sum(run * part for run, part in zip(runs, of, strict=True)) for of in matrix.tolist()]
    return torch.stack(sums, -1).flatten(-2)


def _odd_factor(size: int) -> int:
    return size // (size & -size)


@lru_cache(maxsize=16)
def _cosines(size: int) -> Tensor:
    """Orthonormal discrete cosine transform of type II `[size, size]`, float64."""
    number = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * number[:, None] * (number + 0.5)) * math.sqrt(2 / size)
    matrix[0] = 1 / math.sqrt(size)
    return matrix


def packed(codes: Tensor, bits: int) -> Tensor:
    """Bytes `[n, D·bits / 8]` of codes `[n, D]`, D a multiple of 8, plane after plane.

    A byte of a plane of w bits holds channels that lie D·w / 8 apart, the first lowest.
    """
    planes = []
    for width in PLANES[bits]:
        pieces = (codes & 2**width - 1).chunk(8 // width, dim=1)
        plane = pieces[0].clone()
        for place, piece in enumerate(pieces[1:], 1):
            plane |= piece << place * width
        planes.append(plane)
        codes = codes >> width
    return torch.cat(planes, 1)


def runs(packed: Tensor, bits: int) -> list[Tensor]:
    """Codes of bytes `[…, D·bits / 8]`, uint8, in equal runs of consecutive channels."""
    if bits != 3:
        return [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    # Bytes of the two low bits hold four codes, of which every second one is in each half.
    *low, high = packed.chunk(3, -1)
    return [low[i % 2] >> i // 2 * 2 & 3 | (high >> i & 1) << 2 for i in range(8)]


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes `[…, D]`, uint8, of bytes `[…, D·bits / 8]`: inverse of `packed`."""
    return torch.cat(runs(packed, bits), -1)
