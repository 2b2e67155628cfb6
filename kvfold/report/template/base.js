"use strict";
// Data and state of the page, and constructors of elements and number texts.
// Names come from users: they become text nodes and attribute values only.

const data = JSON.parse(document.getElementById("data").textContent);
const svgSpace = document.querySelector("svg").namespaceURI;

const state = {
  board: data.boards[0],
  view: "overall\nall tasks",
  length: null,
  hiddenBudgets: new Set(),
  hiddenMethods: new Set(),
  sort: { column: null, ascending: false },
  budget: null, // of the matrix
  columns: "group", // of the matrix
  needle: null,
};

const byId = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(svgSpace, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Rows of a view as objects.
const unpacked = new Map();
function unpack(rows) {
  if (!unpacked.has(rows)) {
    unpacked.set(rows, rows.map((values) => {
      const row = Object.fromEntries(data.fields.map((field, i) => [field, values[i]]));
      row.style = data.methods[row.method];
      row.noise = row.low !== null && row.low <= 0 && row.high >= 0;
      return row;
    }));
  }
  return unpacked.get(rows);
}

function findView(kind, name, length) {
  const same = (view) => view.kind === kind && view.name === name && view.length === length;
  return state.board.views.find(same);
}

function viewRows(kind, name, length) {
  const found = findView(kind, name, length);
  return found ? unpack(found.rows) : [];
}

function currentView() {
  const [kind, name] = state.view.split("\n");
  return findView(kind, name, state.length);
}

function currentRows() {
  const found = currentView();
  return found ? unpack(found.rows) : [];
}

const isShown = (row) =>
  !state.hiddenMethods.has(row.method) && (row.budget === null || !state.hiddenBudgets.has(row.budget));

const minus = (text) => (Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−"));
const fixed = (value, digits = 1) => (value === null ? "–" : minus(value.toFixed(digits)));
const times = (value) => (value === null ? "–" : `${fixed(value, 2)} ×`);
const signed = (value) => (Number(value.toFixed(1)) > 0 ? "+" : "") + fixed(value);
const count = (value) => value.toLocaleString("en");
const plural = (value, one) => `${count(value)} ${one}${value === 1 ? "" : "s"}`;

function percent(ratio) {
  if (ratio === null) return "–";
  return `${fixed(100 * ratio, ratio < 0.0995 ? 1 : 0)} %`;
}

function kept(row) {
  if (row.kept === null) return "–";
  const measured = percent(row.kept);
  return row.nominal === null ? measured : `${percent(row.nominal)} → ${measured}`;
}

const withInterval = (row) =>
  fixed(row.score) + (row.least === null ? "" : ` (${fixed(row.least)} to ${fixed(row.most)})`);
// Where there is no interval, the score itself.
const least = (row) => row.least ?? row.score, most = (row) => row.most ?? row.score;
const interval = (row) => (row.low === null ? "" : `${signed(row.low)} to ${signed(row.high)}`);
const place = (row) =>
  row.first === null ? "–" : row.first === row.last ? `${row.first}` : `${row.first}–${row.last}`;
const atBudget = (row) => (row.budget === null ? row.style.label : `${row.style.label} at ${row.budget}`);

// One shape for a method, everywhere.
const shapes = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  square: "M-3.6,-3.6h7.2v7.2h-7.2Z",
  triangle: "M0,-4.8L4.6,3.4H-4.6Z",
  diamond: "M0,-5L5,0L0,5L-5,0Z",
  hourglass: "M-4.2,-4.4H4.2L-4.2,4.4H4.2Z",
  wedge: "M-3.6,-4.4L4.8,0L-3.6,4.4Z",
  pentagon: "M0,-4.9L4.7,-1.5L2.9,4H-2.9L-4.7,-1.5Z",
  arrow: "M0,4.8L4.6,-3.4H-4.6Z",
  star: "M0,-6.5L1.7,-2.1L6.4,-1.9L2.7,1L4,5.6L0,3L-4,5.6L-2.7,1L-6.4,-1.9L-1.7,-2.1Z",
  cross: "M-3.5,-3.5L3.5,3.5M3.5,-3.5L-3.5,3.5",
  plus: "M0,-4.5V4.5M-4.5,0H4.5",
  dash: "M-4.5,-2.2H4.5M-4.5,2.2H4.5",
};
const isOpen = (style) => ["cross", "plus", "dash"].includes(style.shape);
const colorClass = (style) => (style.color === null ? "baseline" : `c${style.color}`);

function mark(style, attributes = {}) {
  const kind = isOpen(style) ? "mark open" : "mark";
  return draw("path", { d: shapes[style.shape], class: `${kind} ${colorClass(style)}`, ...attributes });
}

function key(style) {
  return draw("svg", { class: "key", viewBox: "-7 -7 14 14", "aria-hidden": true }, mark(style));
}

// The shape on a piece of its line.
function lineKey(style) {
  return draw("svg", { class: `key line ${colorClass(style)}`, viewBox: "-18 -7 36 14", "aria-hidden": true },
    draw("line", { x1: -18, x2: 18, ...dashed(style) }), mark(style));
}

const dashed = (style) => (style.dash.length ? { "stroke-dasharray": style.dash.join(" ") } : {});

// Long names break after punctuation first.
const breakable = (text) => text.split(/(?<=[:,=_])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
const named = (style) =>
  make("span", { class: "named" }, key(style), make("span", {}, breakable(style.label)));
