// Canvases that show grids by a colour ramp, and line charts as SVG.
"use strict";

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const percent = (x, digits = 0) => `${(100 * x).toFixed(digits)} %`;
const css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const redraws = [];

function make(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// 256 colours between the stops given, as [red, green, blue].
function ramp(stops) {
  const channels = stops.map((s) => [1, 3, 5].map((i) => parseInt(s.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return channels[low].map((c, j) => c + (channels[low + 1][j] - c) * (at - low));
  });
}
const inkRamp = () => ramp([0, 1, 2, 3, 4].map((i) => css(`--ramp${i}`)));
const depthRamp = () => dark.matches
  ? ramp(["#5b6fd0", "#2aa7a0", "#7ad151", "#fde725"])
  : ramp(["#440154", "#31688e", "#1c8e7b", "#6f8c00"]);

// Draws width × height values 0…255 by the ramp; `hidden` values stay transparent.
function paint(canvas, width, height, value, hidden = -1) {
  const draw = () => {
    const colors = inkRamp(), context = canvas.getContext("2d");
    canvas.width = width;
    canvas.height = height;
    const image = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      const v = value(i % width, Math.floor(i / width));
      if (v === hidden) continue;
      const [red, green, blue] = colors[Math.round(v)];
      image.data.set([red, green, blue, 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
  };
  draw();
  redraws.push(draw);
}

function describe(element, role, label) {
  element.setAttribute("role", role);
  element.setAttribute("aria-label", label);
}

const svgSpace = document.getElementById("svg").namespaceURI;

function shape(parent, tag, attributes, text) {
  const element = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// From values of an axis to pixels.
function scale({ min, max, log }, from, to) {
  const f = log ? Math.log10 : (x) => x, low = f(min), high = f(max);
  return (x) => from + ((f(Math.max(x, log ? min : x)) - low) / (high - low || 1)) * (to - from);
}

function decades(min, max) {
  const first = Math.ceil(Math.log10(min) - 1e-9), last = Math.floor(Math.log10(max) + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i));
}

function evenly(max) {
  const rough = max / 4, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= rough);
  return Array.from({ length: Math.floor(max / step + 1e-9) + 1 }, (_, i) => i * step);
}

// The marks of a chart's series, of a radius of 4; neighbours differ by more than their colour.
const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "M-3.6,-3.6h7.2v7.2h-7.2Z", "M0,-4.8L4.6,3.4H-4.6Z",
  "M0,-5L5,0L0,5L-5,0Z", "M-4.2,-4.4H4.2L-4.2,4.4H4.2Z", "M-3.6,-4.4L4.8,0L-3.6,4.4Z",
  "M0,-4.9L4.7,-1.5L2.9,4H-2.9L-4.7,-1.5Z", "M0,4.8L4.6,-3.4H-4.6Z",
];
const DASHES = [undefined, "7 3", "2 3", "9 3 2 3"];

function mark(parent, number, color, x, y, size) {
  const at = { transform: `translate(${x},${y}) scale(${size})`, fill: color };
  return shape(parent, "path", { d: MARKS[(number ?? 0) % MARKS.length], ...at });
}

const stroke = (s, color) =>
  ({ stroke: color, "stroke-width": s.dash ? 1.7 : 2.2, "stroke-dasharray": s.dash ?? "none" });

const colorOf = (s) => (typeof s.color === "function" ? s.color() : s.color);

function legend(box, series) {
  const list = make(box, "div", "keys");
  for (const s of series.filter((each) => each.label)) {
    const name = make(list, "span"), color = colorOf(s);
    const key = shape(name, "svg", { class: "key", viewBox: "-17 -7 34 14", "aria-hidden": "true" });
    if (s.line !== false) shape(key, "line", { x1: -17, x2: 17, ...stroke(s, color) });
    if (s.dots) mark(key, s.mark, color, 0, 0, 1);
    name.append(s.label);
  }
  return list.offsetHeight + 4;
}

// A chart of axes x, y {min, max, log, ticks, format, label} and of series
// {label, color, points: [[x, y, note]], band: [[x, low, high]], dots: radius, mark: number of a
// shape, dash, line: false}.
function chart(box, { x, y, series }) {
  const render = () => {
    box.replaceChildren();
    const taken = legend(box, series);
    const width = box.clientWidth, height = box.clientHeight - taken;
    const left = 46, right = width - 12, top = 18, bottom = height - 42;
    const name = `${y.label} by ${x.label}`;
    const svg = shape(box, "svg", { width, height, role: "img", "aria-label": name });
    const px = scale(x, left, right), py = scale(y, bottom, top);
    for (const tick of y.ticks) {
      const at = py(tick);
      shape(svg, "line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
      shape(svg, "text", { x: left - 7, y: at + 4, "text-anchor": "end" }, y.format(tick));
    }
    const every = Math.max(1, Math.ceil((46 * x.ticks.length) / (right - left)));
    x.ticks.filter((_, i) => i % every === 0).forEach((tick) => {
      const place = { x: px(tick), y: bottom + 19, "text-anchor": "middle" };
      shape(svg, "text", place, x.format(tick));
    });
    const middle = { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" };
    shape(svg, "text", middle, x.label);
    shape(svg, "text", { x: 0, y: 9 }, y.label);
    for (const s of series) drawSeries(svg, s, px, py);
  };
  new ResizeObserver(render).observe(box);
  redraws.push(render);
}

function drawSeries(svg, s, px, py) {
  const color = colorOf(s);
  const path = (points) =>
    "M" + points.map(([a, b]) => `${px(a).toFixed(1)},${py(b).toFixed(1)}`).join("L");
  if (s.band) {
    const high = s.band.map(([a, , b]) => [a, b]), low = s.band.map(([a, b]) => [a, b]).reverse();
    shape(svg, "path", { d: `${path([...high, ...low])}Z`, fill: color, opacity: 0.14 });
  }
  if (s.line !== false) {
    const line = { d: path(s.points), fill: "none", "stroke-linejoin": "round" };
    shape(svg, "path", { ...line, ...stroke(s, color) });
  }
  if (!s.dots) return;
  for (const [a, b, note] of s.points) {
    const dot = mark(svg, s.mark, color, px(a), py(b), s.dots / 4);
    if (note) shape(dot, "title", {}, note);
  }
}

dark.addEventListener("change", () => redraws.forEach((redraw) => redraw()));
