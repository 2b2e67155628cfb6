# SPDX-License-Identifier: Apache-2.0
"""The picture of a check's page: mean KL against the kept part, as inline SVG."""

from __future__ import annotations

import math
from html import escape

from kvfold.checks.result import CheckCell, CheckResult

WIDTH, HEIGHT = 900, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 46
COLORS, SIZE = 8, 5
# Corners of the marks, in units of their size; methods that share a colour differ in shape.
SHAPES = (
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((0, -1.3), (1.2, 1), (-1.2, 1)),
    ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    ((0, 1.3), (1.2, -1), (-1.2, -1)),
    ((-1.5, -0.6), (1.5, -0.6), (1.5, 0.6), (-1.5, 0.6)),
)


def chart(result: CheckResult) -> str:
    """SVG with a mark for every cell, those of the search included."""
    lines = points(result)
    values = [v for cells in lines.values() for c in cells for v in (c.kl.low, c.kl.high) if v > 0]
    scale = _Scale([*values, result.limits.mean_kl, result.floor])
    parts = [scale.grid(), scale.level(result.limits.mean_kl, "tolerance")]
    if result.floor > 0:
        parts.append(scale.level(result.floor, "noise"))
    for number, cells in enumerate(lines.values()):
        parts.append(f'<g class="c{number % COLORS}">{_line(scale, cells, number)}</g>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Mean KL against the kept part">{"".join(parts)}</svg>'
    )


def legend(result: CheckResult) -> str:
    """A mark and the name of every method."""
    made = []
    for number, method in enumerate(points(result)):
        key = f'class="key c{number % COLORS}" aria-hidden="true"'
        mark = f'<svg viewBox="-9 -9 18 18" {key}>{_mark(0, 0, number)}</svg>'
        made.append(f"<span>{mark}{escape(method)}</span>")
    return "".join(made)


def points(result: CheckResult) -> dict[str, list[CheckCell]]:
    """Cells of each method from small to large: the table's, and those of its certificate."""
    found: dict[str, dict[str | None, CheckCell]] = {}
    for each in result.certificates:
        own = found.setdefault(each.method, {})
        if each.held_out or each.found:
            own[each.budget] = each.held_out or each.found  # type: ignore[assignment]
    for cell in result.cells:
        found.setdefault(cell.method, {})[cell.budget] = cell
    return {
        method: sorted(cells.values(), key=lambda cell: cell.kept)
        for method, cells in found.items()
    }


class _Scale:
    """Coordinates of kept parts and, logarithmic in whole decades, of KL."""

    def __init__(self, values: list[float]) -> None:
        some = [value for value in values if value > 0] or [1.0]
        self.low = math.floor(math.log10(min(some)))
        self.high = max(math.ceil(math.log10(max(some))), self.low + 1)

    def x(self, kept: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * kept

    def y(self, kl: float) -> float:
        level = math.log10(kl) if kl > 0 else self.low
        part = (min(max(level, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    def grid(self) -> str:
        made = []
        for power in range(self.low, self.high + 1):
            y = self.y(10.0**power)
            made.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            made.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
        for tenth in range(0, 11, 2):
            x = self.x(tenth / 10)
            label = f"{tenth * 10} %" if tenth < 10 else "100 % kept"
            end = "end" if tenth == 10 else "middle"
            made.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="{end}">{label}</text>')
        return "".join(made)

    def level(self, kl: float, kind: str) -> str:
        return f'<path class="{kind}" d="M{LEFT} {self.y(kl):.1f}H{WIDTH - RIGHT}"/>'


def _line(scale: _Scale, cells: list[CheckCell], number: int) -> str:
    places = [(scale.x(cell.kept), scale.y(cell.kl.value)) for cell in cells]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    made = [f'<path class="path" d="M{path}"/>'] if len(places) > 1 else []
    for cell, (x, y) in zip(cells, places, strict=True):
        low, high = scale.y(cell.kl.low), scale.y(cell.kl.high)
        made.append(f'<path class="bar" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        name = f"{cell.method}, {cell.kept:.1%} kept: mean KL {cell.kl.value:.3g}"
        made.append(f"<g><title>{escape(name)}</title>{_mark(x, y, number)}</g>")
    return "".join(made)


def _mark(x: float, y: float, number: int) -> str:
    corners = SHAPES[(number + number // COLORS) % len(SHAPES)]
    shape = " ".join(f"{x + SIZE * a:.1f},{y + SIZE * b:.1f}" for a, b in corners)
    return f'<polygon class="mark" points="{shape}"/>'
