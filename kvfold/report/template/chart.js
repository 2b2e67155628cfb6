// Score against measured bytes, with standard errors and the frontier.

const ticks = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];

function chart(holder, rows, lower) {
  const points = rows.filter((row) => row.bytes !== null && row.score !== null && isShown(row));
  if (!points.length) {
    holder.replaceChildren(make("p", { class: "empty" }, "Nothing to show: choose a method and a budget."));
    return;
  }
  const width = Math.max(holder.clientWidth, 280), narrow = width < 620;
  const height = Math.round(Math.min(Math.max(width * 0.5, 340), 540));
  const frame = { left: narrow ? 30 : 40, right: narrow ? 8 : 20, top: 14, bottom: 44 };
  const scale = scales(points, width, height, frame, narrow, lower);
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "application",
    "aria-label": `${lower ? "Perplexity" : "Score"} against measured bytes, ${points.length} points. ` +
      "Arrow keys go from point to point; the table below holds the same numbers.",
  });
  svg.append(grid(scale, width, height, frame, narrow, lower));
  const full = points.find((row) => row.style.full);
  if (full) svg.append(fullBand(full, scale, width, frame));
  const edge = points.filter((row) => row.edge).sort((a, b) => a.bytes - b.bytes);
  if (edge.length > 1) svg.append(draw("path", { class: "edge", d: line(edge, scale) }));
  const methods = [...new Set(points.map((row) => row.method))].reverse();
  for (const method of methods) {
    svg.append(series(points.filter((row) => row.method === method), scale));
  }
  svg.append(labels(points, scale, narrow, lower, frame, height));
  hover(svg, points, scale);
  holder.replaceChildren(svg);
}

function scales(points, width, height, frame, narrow, lower) {
  const bytes = points.map((row) => row.bytes);
  const first = Math.min(...bytes) / (narrow ? 1.3 : 1.75), last = Math.max(...bytes, 0.5) * 1.12;
  const [low, high, step] = rounded(Math.min(...points.map(least)), Math.max(...points.map(most)));
  const wide = width - frame.left - frame.right, tall = height - frame.top - frame.bottom;
  return {
    x: (value) => frame.left + (wide * Math.log(value / first)) / Math.log(last / first),
    y: (value) => frame.top + tall * (1 - (value - low) / (high - low)),
    low, high, step, first, last,
  };
}

function rounded(low, high) {
  const rough = Math.max(high - low, 1) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const bottom = Math.floor(low / step) * step, top = Math.ceil(high / step) * step;
  return bottom < top ? [bottom, top, step] : [bottom - step, top + step, step];
}

function grid(scale, width, height, frame, narrow, lower) {
  const parts = [];
  for (let value = scale.low; value <= scale.high + 1e-9; value += scale.step) {
    const y = scale.y(value);
    parts.push(draw("line", { class: "grid", x1: frame.left, x2: width - frame.right, y1: y, y2: y }));
    parts.push(draw("text", { x: frame.left - 8, y: y + 4, "text-anchor": "end" }, fixed(value, scale.step < 1 ? 1 : 0)));
  }
  for (const tick of ticks.filter((tick) => tick >= scale.first && tick <= scale.last)) {
    parts.push(draw("text", { x: scale.x(tick), y: height - 24, "text-anchor": "middle" }, percent(tick).replace(".0", "")));
    parts.push(draw("line", { class: "tick", x1: scale.x(tick), x2: scale.x(tick), y1: height - 44, y2: height - 39 }));
  }
  const caption = narrow ? "bytes, of the full cache’s" : "measured bytes, of the full cache’s (logarithmic)";
  parts.push(draw("text", { class: "axis", x: width - frame.right, y: height - 5, "text-anchor": "end" }, `${caption} →`));
  parts.push(draw("text", { class: "axis", x: frame.left, y: height - 5 }, lower ? "↓ perplexity" : "↑ score, %"));
  return draw("g", {}, parts);
}

function fullBand(full, scale, width, frame) {
  const span = { x: frame.left, width: width - frame.left - frame.right };
  const y = scale.y(full.score), text = `full cache ${fixed(full.score)}`;
  const top = scale.y(most(full)), bottom = scale.y(least(full));
  return draw("g", { class: "full" },
    draw("rect", { ...span, y: top, height: bottom - top }),
    draw("line", { x1: span.x, x2: span.x + span.width, y1: y, y2: y }),
    draw("text", { x: frame.left + 6, y: top + (top > 26 ? -6 : 16) }, text));
}

const line = (points, scale) =>
  points.map((row, i) => `${i ? "L" : "M"}${scale.x(row.bytes).toFixed(1)},${scale.y(row.score).toFixed(1)}`).join("");

// Methods on the frontier or leading at a budget are drawn strong, all others faint.
const isStrong = (rows) => rows.some((row) => row.edge || row.first === 1);

function series(rows, scale) {
  const { style, method } = rows[0];
  const own = [...rows].sort((a, b) => a.bytes - b.bytes);
  const classes = ["series", colorClass(style), isStrong(own) ? "strong" : ""].join(" ");
  const group = draw("g", { class: classes, "data-method": method });
  if (own.length > 1) {
    group.append(draw("path", { class: "path", d: line(own, scale), ...dashed(style) }));
  }
  for (const row of own) {
    const x = scale.x(row.bytes), bar = `M${x},${scale.y(least(row))}V${scale.y(most(row))}`;
    if (!style.full) group.append(draw("path", { class: "bar", d: bar }));
    group.append(mark(style, { transform: `translate(${x},${scale.y(row.score)})`, class:
      `mark ${isOpen(style) ? "open" : ""} ${row.units < row.expected ? "partial" : ""}` }));
  }
  return group;
}

// The names of strong methods and baselines where their lines begin, kept apart from each other and
// from the line of the full cache.
function labels(points, scale, narrow, lower, frame, height) {
  const full = points.find((row) => row.style.full);
  const firsts = [...new Set(points.map((row) => row.method))].map((method) =>
    points.filter((row) => row.method === method).sort((a, b) => a.bytes - b.bytes)[0]);
  const strong = (row) => isStrong(points.filter((other) => other.method === row.method));
  const wanted = firsts.filter((row) => !row.style.full &&
    (narrow ? row.edge : strong(row) || row.style.baseline));
  const placed = [];
  for (const row of wanted.sort((a, b) => b.score - a.score)) {
    const x = scale.x(row.bytes), y = scale.y(row.score), name = shortened(row.style.label, 24);
    const crowded = full && Math.abs(y - scale.y(full.score)) < 14;
    const before = x - frame.left > 6.4 * name.length + 12;
    const label = { name, style: row.style, method: row.method, before, x: before ? x - 10 : x + 8,
      y: y + (crowded ? 18 : before ? 4 : lower ? -10 : 18) };
    const near = placed.filter((other) => Math.abs(other.x - label.x) < 130);
    while (near.some((other) => Math.abs(other.y - label.y) < 14)) label.y += 2;
    if (label.y < height - frame.bottom) placed.push(label);
  }
  return draw("g", { class: "names" }, placed.map(({ name, style, method, before, x, y }) =>
    draw("text", { x, y, "text-anchor": before ? "end" : "start", class: colorClass(style),
      "data-method": method }, name)));
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function hover(svg, points, scale) {
  const at = points.map((row) => ({ row, x: scale.x(row.bytes), y: scale.y(row.score) }));
  let current = null;
  const show = (point) => {
    current = point;
    emphasise(point ? point.row.method : null);
    if (!point) return tip(null);
    const box = svg.getBoundingClientRect();
    tip(details(point.row), box.left + point.x, box.top + point.y);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const away = (p) => Math.hypot(p.x - event.clientX + box.left, p.y - event.clientY + box.top);
    const nearest = at.reduce((a, b) => (away(b) < away(a) ? b : a));
    show(away(nearest) < 28 ? nearest : null);
  });
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const order = [...at].sort((a, b) => b.row.bytes - a.row.bytes || b.row.score - a.row.score);
    const own = current ? order.filter((p) => p.row.method === current.row.method) : order;
    const level = current ? at.filter((p) => p.row.budget === current.row.budget).sort((a, b) => a.y - b.y) : order;
    const moves = { ArrowLeft: [own, 1], ArrowRight: [own, -1], ArrowDown: [level, 1], ArrowUp: [level, -1] };
    if (event.key === "Escape") show(null);
    if (!moves[event.key]) return;
    event.preventDefault();
    const [list, step] = moves[event.key];
    show(current ? list[Math.min(Math.max(list.indexOf(current) + step, 0), list.length - 1)] : order[0]);
  });
}

function details(row) {
  const facts = [["score", withInterval(row)]];
  if (row.gap !== null) facts.push(["− full", `${signed(row.gap)} (${interval(row)})`]);
  facts.push(["bytes", percent(row.bytes)], ["entries kept", kept(row)]);
  if (row.first !== null) facts.push(["place", place(row)]);
  for (const [name, value] of [["prefill time", row.prefill], ["operations of prefill", row.prefillOperations],
    ["of a decode step", row.stepOperations], ["length of answers", row.length]])
    if (value !== null) facts.push([name, times(value)]);
  facts.push(["samples", count(row.samples)]);
  if (row.units < row.expected) facts.push(["incomplete", `${row.units} of ${row.expected} tasks and lengths`]);
  return [make("strong", {}, key(row.style), atBudget(row)),
    make("dl", {}, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]).flat())];
}

function tip(content, x, y) {
  const box = byId("tip");
  box.hidden = content === null;
  if (content === null) return;
  box.replaceChildren(...content);
  const wide = box.offsetWidth, tall = box.offsetHeight;
  const left = Math.min(Math.max(x - wide / 2, 8), document.documentElement.clientWidth - wide - 8);
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${(y - tall - 16 > 0 ? y - tall - 16 : y + 16) + window.scrollY}px`;
}
