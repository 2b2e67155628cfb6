// Reads the data that comes with the page, and fills its sections.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const tokens = data.pieces.length, layers = data.attention, names = data.layers;
const grouped = (x) => Math.round(x).toLocaleString("en");
const short = (x) => (x < 10 ? x.toPrecision(2) : grouped(x));
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const [accent, warm, quiet] = ["--accent", "--needle", "--gone"].map((name) => () => css(name));
for (const method of data.methods) method.counts = bytes(method.counts);

for (const [name, value] of data.facts) {
  const fact = make(at("facts"), "div");
  make(fact, "dt", "", name);
  make(fact, "dd", "", value);
}

// The text.
document.body.classList.toggle("plain", data.needles.length === 0);
const methods = new Methods(data, at("methods"), at("tip"));
const slider = at("layer");
function choose(step) {
  at("layer-name").textContent = step ? names[step - 1] : "all";
  methods.show(step ? step - 1 : null);
}
slider.max = names.length;
slider.addEventListener("input", () => choose(Number(slider.value)));
choose(0);
addEventListener("resize", () => methods.cards.forEach((card) => methods.frame(card)));
data.needles.forEach((needle, i) => {
  const button = make(at("jumps"), "button", needle.asked ? "asked" : "", String(i + 1));
  button.title = needle.asked ? "the needle that the question is about" : "a needle";
  button.addEventListener("click", () => methods.goTo(needle.start));
});

// Charts by layer.
const byLayer = {
  min: names[0] - 0.15, max: names.at(-1) + 0.15, ticks: names, format: String, label: "layer",
};
const dot = names.length > 16 ? 2.5 : 4;
const perHead = (method, l) => {
  const counts = method.counts.subarray(l * tokens, (l + 1) * tokens);
  return counts.reduce((a, b) => a + b, 0) / data.heads[l];
};
const spent = data.methods.map((method) => names.map((_, l) => perHead(method, l)));
const most = Math.max(...spent.flat());
chart(at("budgets"), {
  x: byLayer,
  y: { min: 0, max: most, ticks: evenly(most), format: grouped, label: "entries per KV head" },
  series: data.methods.map((method, i) => ({
    label: method.name,
    color: () => css(`--c${i % 8}`),
    mark: i,
    dash: DASHES[i % DASHES.length],
    dots: dot,
    points: names.map((n, l) => [n, spent[i][l], `layer ${n}: ${grouped(spent[i][l])} entries`]),
  })),
});

const heads = (label, color, values, mark) => ({
  label, color, mark, dots: dot,
  points: names.map((n, l) => [n, mean(values[l]), `layer ${n}: ${short(mean(values[l]))}`]),
  band: names.map((n, l) => [n, Math.min(...values[l]), Math.max(...values[l])]),
});
const perQuery = layers.map((layer) => layer.entropy.map(Math.exp));
const ofTokens = `entries, of ${grouped(tokens)}`;
at("most").textContent = percent(data.most);
chart(at("pyramid"), {
  x: byLayer,
  y: {
    min: 1, max: tokens, log: true, ticks: decades(1, tokens), format: grouped, label: ofTokens,
  },
  series: [
    heads(`hold ${percent(data.most)} of all attention`, accent, layers.map((l) => l.holders), 0),
    heads("one query attends to", warm, perQuery, 3),
  ],
});

const variances = layers.flatMap((l, i) => l.variance.map((v) => [names[i], v, short(v)]));
const logs = variances.map(([, v]) => Math.log10(Math.max(v, 1e-12)));
const low = 10 ** Math.floor(Math.min(...logs)), high = 10 ** Math.ceil(Math.max(...logs));
const plain = (x) => (x < 1e-3 || x >= 1e5 ? x.toExponential(0) : String(+x.toPrecision(1)));
chart(at("variance"), {
  x: byLayer,
  y: {
    min: low, max: high, log: true, ticks: decades(low, high), format: plain, label: "variance",
  },
  series: [
    { label: "KV heads", color: quiet, line: false, dots: 3.5, points: variances },
    { label: "mean", color: accent, points: layers.map((l, i) => [names[i], mean(l.variance)]) },
  ],
});
const widest = Math.max(1.2, ...data.d2o), times = (x) => `${+x.toFixed(2)}×`;
chart(at("share"), {
  x: byLayer,
  y: {
    min: 0, max: widest, ticks: evenly(widest), format: times, label: "budget, over an even one",
  },
  series: [
    { label: "D2O", color: accent, dots: dot, points: names.map((n, l) => [n, data.d2o[l]]) },
    { label: "even", color: quiet, dash: "4 4", points: [[byLayer.min, 1], [byLayer.max, 1]] },
  ],
});

// Heatmaps: bytes 1…255 are five decades up to 1, and 0 is masked.
const side = data.cuts.length - 1;
at("heatmaps").classList.toggle("many", layers.length > 12);
const span = (i) => `${grouped(data.cuts[i])} to ${grouped(data.cuts[i + 1] - 1)}`;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const cellAt = (at, from, size) =>
  Math.min(side - 1, Math.max(0, Math.floor(((at - from) / size) * side)));
layers.forEach((layer, l) => {
  const figure = make(at("heatmaps"), "figure"), caption = make(figure, "figcaption");
  make(caption, "b", "", `Layer ${names[l]}`);
  make(caption, "span", "", `${short(mean(perQuery[l]))} entries per query`);
  const canvas = make(figure, "canvas"), cells = bytes(layer.cells);
  describe(canvas, "application", `Attention of layer ${names[l]}; arrow keys go from cell to cell`);
  canvas.tabIndex = 0;
  paint(canvas, side, side, (x, y) => cells[y * side + x], 0);
  const read = (x, y) => {
    const part = 10 ** ((5 * (cells[y * side + x] - 255)) / 254);
    at("cell").textContent = x > y
      ? "Queries do not attend to later entries."
      : `Layer ${names[l]}: queries ${span(y)} give ${percent(part, part < 0.01 ? 3 : 1)} of ` +
        `their attention to entries ${span(x)}.`;
  };
  const point = (event) => {
    const area = canvas.getBoundingClientRect();
    read(cellAt(event.clientX, area.left, area.width), cellAt(event.clientY, area.top, area.height));
  };
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, point);
  let [column, row] = [0, side - 1];
  canvas.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    column = Math.min(side - 1, Math.max(0, column + move[0]));
    row = Math.min(side - 1, Math.max(0, row + move[1]));
    read(column, row);
  });
});

// Lazy layers.
at("sinks").textContent = data.sinks;
at("window").textContent = grouped(data.window);
layers.forEach((layer, l) => {
  make(at("lazy"), "span", "name", `layer ${names[l]}`);
  const canvas = make(at("lazy"), "canvas"), edges = bytes(layer.edges);
  describe(canvas, "img", `Attention of layer ${names[l]} on the first and last entries, query by query`);
  canvas.style.height = `${Math.max(8, Math.min(26, 260 / layers.length))}px`;
  paint(canvas, edges.length, 1, (x) => edges[x]);
  make(at("lazy"), "span", "", percent(layer.lazy));
});

// Norms: between two thresholds, the loss is at most the higher one.
const lost = data.thresholds;
const stairs = (kept) =>
  kept.flatMap((k, i) => [[kept[Math.max(0, i - 1)], lost[i]], [k, lost[i]]]);
const named = Math.ceil(layers.length / 12);
const byDepth = (l) => () => {
  const shade = Math.round((255 * l) / Math.max(1, layers.length - 1));
  return `rgb(${depthRamp()[shade].map(Math.round)})`;
};
chart(at("norms"), {
  x: {
    min: 0, max: tokens, ticks: evenly(tokens), format: grouped,
    label: "entries kept: sinks and the newest",
  },
  y: {
    min: lost[0], max: 1, log: true, ticks: decades(lost[0], 1),
    format: (x) => `${+(100 * x).toPrecision(1)} %`, label: "norm lost",
  },
  series: [
    ...layers.map((layer, l) => ({
      label: l % named ? "" : `layer ${names[l]}`, color: byDepth(l), dash: DASHES[l % DASHES.length],
      points: stairs(layer.kept),
    })),
    { label: "the paper's 1 %", color: warm, dash: "5 4", points: [[0, 0.01], [tokens, 0.01]] },
  ],
});
