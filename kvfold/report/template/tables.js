// The strips of the summary, the sortable table, and the matrix of tasks.

const byScore = (lower) => (a, b) =>
  lower ? (a.score ?? Infinity) - (b.score ?? Infinity) : (b.score ?? -Infinity) - (a.score ?? -Infinity);

function strips() {
  const rows = viewRows("overall", "all tasks", null).filter((row) => row.score !== null);
  byId("strips").hidden = !rows.length || !state.board.budgets.length;
  if (byId("strips").hidden) return;
  const budgets = state.board.budgets, full = rows.find((row) => row.style.full);
  const scores = rows.map((row) => row.score);
  const low = Math.max(Math.min(...scores) - 3, 0), high = Math.min(Math.max(...scores) + 3, 100);
  const at = (score) => `${(100 * (score - low)) / (high - low)}%`;
  const position = (element, score) => {
    element.style.left = at(score);
    return element;
  };
  const lines = budgets.map((budget) => {
    const own = rows.filter((row) => row.budget === budget).sort(byScore(false));
    const leaders = own.filter((row) => row.first === 1 && !row.style.baseline);
    const track = make("div", { class: "track", "aria-hidden": true });
    if (full) track.append(position(make("i", { class: "fullline" }), full.score));
    for (const row of [...own].reverse()) {
      const holder = position(make("span", {
        class: leaders.includes(row) || row.style.baseline ? "dot lead" : "dot",
        title: `${row.style.label}: ${withInterval(row)}`, "data-method": row.method,
      }), row.score);
      holder.append(key(row.style));
      track.append(holder);
    }
    return make("div", { class: "strip" },
      make("div", { class: "budget" }, make("b", {}, budget), make("span", {}, bytesHeld(own))),
      track, verdict(leaders, own));
  });
  const scale = make("div", { class: "strip ends" }, make("div", { class: "budget" }, "budget"),
    make("div", { class: "track" }, make("span", {}, `${fixed(low, 0)} %`),
      full ? position(make("span", { class: "fulltext" }, `full cache ${fixed(full.score)}`), full.score) : null),
    make("div", { class: "verdict" }, "leading"));
  byId("strips").replaceChildren(scale, ...lines);
}

function bytesHeld(rows) {
  const bytes = rows.filter((row) => row.bytes !== null && !row.style.baseline).map((row) => row.bytes);
  if (!bytes.length) return "";
  const [low, high] = [percent(Math.min(...bytes)), percent(Math.max(...bytes))];
  return `${low === high ? high : `${low.replace(" %", "")}–${high}`} of bytes`;
}

// The best method, and everything that intervals do not tell from it.
function verdict(leaders, own) {
  if (!leaders.length) {
    const best = own.find((row) => row.first === 1);
    return make("div", { class: "verdict" }, make("b", {}, best ? best.style.label : "–"),
      make("small", {}, best ? "no method beats it" : "intervals are unknown"));
  }
  const best = leaders[0], alike = own.filter((row) => row.first === 1 && row !== best);
  const names = alike.length > 2 ? `${alike.length} others` : alike.map((row) => row.style.label).join(", ");
  return make("div", { class: "verdict" }, named(best.style),
    make("small", {}, [withInterval(best), best.gap === null ? "" : `${signed(best.gap)} to full`,
      names && `not told apart from ${names}`].filter(Boolean).join(" · ")));
}

const allColumns = [
  ["method", "Method", (row) => row.style.label, (row) => named(row.style)],
  ["budget", "Budget", (row) => row.nominal ?? row.kept ?? 1, (row) => row.budget ?? "–"],
  ["score", "Score", (row) => row.score, (row) => withInterval(row)],
  ["gap", "Difference to full", (row) => row.gap, gapCell],
  ["place", "Place", (row) => (row.first === null ? null : -row.first), place],
  ["bytes", "Bytes", (row) => row.bytes, (row) => percent(row.bytes)],
  ["kept", "Kept", (row) => row.kept, kept],
  ["operations", "Operations", (row) => row.prefillOperations, (row) => `${fixed(row.prefillOperations, 2)} / ${times(row.stepOperations)}`],
  ["length", "Answers", (row) => row.length, (row) => times(row.length)],
  ["prefill", "Prefill", (row) => row.prefill, (row) => times(row.prefill)],
  ["samples", "Samples", (row) => row.samples, (row) => count(row.samples)],
  ["faults", "Caveats", (row) => row.errors + row.failed + row.truncated + row.expected - row.units, faults],
];

function faults(row) {
  const parts = [];
  if (row.units < row.expected) parts.push(`${row.units} of ${row.expected} run`);
  if (row.errors) parts.push(plural(row.errors, "error"));
  if (row.failed) parts.push(`${count(row.failed)} unparsed`);
  if (row.truncated) parts.push(`${count(row.truncated)} cut`);
  return make("span", { class: "faults" }, parts.join(", "));
}

function isFaulty(row) {
  return row.errors + row.failed + row.truncated > 0 || row.units < row.expected;
}

let reach = [-1, 1]; // of the intervals in the table

function gapCell(row) {
  if (row.gap === null) return row.style.full ? make("span", { class: "muted" }, "reference") : "–";
  const x = (value) => 4 + (112 * (value - reach[0])) / (reach[1] - reach[0]);
  const picture = draw("svg", { class: `forest ${colorClass(row.style)}`, viewBox: "0 0 120 16", "aria-hidden": true },
    draw("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: 16 }),
    draw("line", { class: "range", x1: x(row.low), x2: x(row.high), y1: 8, y2: 8 }),
    draw("circle", { cx: x(row.gap), cy: 8, r: 3 }));
  return make("span", { class: row.noise ? "gap muted" : "gap" }, picture,
    make("span", { class: "value" }, (row.noise ? "≈ " : "") + signed(row.gap)),
    make("small", {}, interval(row)));
}

// Columns of which some record has something to say.
let columns = allColumns;
const optional = {
  faults: isFaulty,
  operations: (row) => row.prefillOperations !== null,
  length: (row) => row.length !== null && row.prefillOperations !== null,
};

function table(holder, rows, lower) {
  const shown = rows.filter(isShown);
  columns = allColumns.filter(([id]) => !(id in optional) || rows.some(optional[id]));
  // Operations say more than the seconds of one machine, and both do not fit.
  if (columns.some(([id]) => id === "operations")) columns = columns.filter(([id]) => id !== "prefill");
  const spans = shown.filter((row) => row.gap !== null).flatMap((row) => [row.low, row.high]);
  reach = [Math.min(-1, ...spans), Math.max(1, ...spans)];
  const { column, ascending } = state.sort;
  const head = make("tr", {}, columns.map(([id, title]) =>
    make("th", { scope: "col", class: id, "aria-sort": column === id ? (ascending ? "ascending" : "descending") : null },
      make("button", { type: "button", "data-column": id, onclick: () => sortBy(id, holder) },
        lower && id === "score" ? "Perplexity" : title))));
  const bodies = column === null ? grouped(shown, lower) : [sorted(shown)];
  holder.replaceChildren(make("table", { class: "sortable" }, make("thead", {}, head),
    bodies.map((body) => make("tbody", {}, body.map(tableRow)))));
  if (!shown.length) holder.append(make("p", { class: "empty" }, "Nothing to show: choose a method and a budget."));
}

function grouped(rows, lower) {
  const order = [null, ...state.board.budgets];
  return order.map((budget) => rows.filter((row) => row.budget === budget)
    .sort((a, b) => Number(b.style.full) - Number(a.style.full) || byScore(lower)(a, b)));
}

function sorted(rows) {
  const value = allColumns.find(([id]) => id === state.sort.column)[2];
  const sign = state.sort.ascending ? 1 : -1;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

function tableRow(row) {
  const classes = [row.style.baseline ? "base" : "", row.units < row.expected ? "partial" : ""].join(" ").trim();
  return make("tr", { class: classes || null }, columns.map(([id, , , show], i) =>
    make(i ? "td" : "th", { class: id, scope: i ? null : "row" }, show(row))));
}

// First down, then up, then back to the order by budget.
function sortBy(column, holder) {
  const first = column === "method";
  if (state.sort.column !== column) state.sort = { column, ascending: first };
  else if (state.sort.ascending === first) state.sort.ascending = !first;
  else state.sort = { column: null, ascending: false };
  render();
  holder.querySelector(`[data-column="${column}"]`).focus();
}

function matrix() {
  const board = state.board, groups = Object.entries(board.groups);
  const budgets = board.budgets, several = groups.length > 1;
  byId("where").hidden = groups.flatMap(([, tasks]) => tasks).length < 2;
  if (!several) state.columns = "task";
  state.budget ??= budgets[Math.floor(budgets.length / 2)] ?? null;
  const names = state.columns === "group" ? groups.map(([name]) => name) : groups.flatMap(([, tasks]) => tasks);
  const weak = (name) => (board.groups[name] ?? [name]).every((task) => board.weak.includes(task));
  byId("where-lead").textContent =
    `Scores at budget ${state.budget ?? "–"} and of methods without one. The stronger a cell’s colour, the more of the ` +
    "full cache’s score is gone; grey and without colour is what cannot be told from the full cache." +
    (names.some(weak) ? " Columns marked ° say little: the full cache itself is near guessing." : "");
  byId("where-choices").replaceChildren(
    ...(budgets.length > 1 ? [radios("budget", "Budget", budgets.map((b) => [b, b]), state.budget)] : []),
    ...(several ? [radios("columns", "Columns", [["group", "groups"], ["task", "tasks"]], state.columns)] : []));
  const inScope = (row) => isShown(row) && (row.budget === null || row.budget === state.budget);
  const overall = viewRows("overall", "all tasks", null).filter(inScope)
    .sort((a, b) => Number(b.style.full) - Number(a.style.full) || byScore(false)(a, b));
  const views = names.map((name) => viewRows(state.columns, name, null));
  const head = make("tr", {}, make("th", { scope: "col" }, "Method"), make("th", { scope: "col", class: "all" }, make("span", {}, "all tasks")),
    names.map((name) => make("th", { scope: "col", class: weak(name) ? "weak" : null }, make("span", {}, weak(name) ? `${name} °` : name))));
  const body = overall.map((row) => make("tr", { class: row.style.baseline ? "base" : null },
    make("th", { scope: "row" }, named(row.style)), matrixCell(row, overall, "all"),
    views.map((rows) => matrixCell(rows.find((r) => r.method === row.method && r.budget === row.budget), rows))));
  byId("matrix").replaceChildren(make("table", { class: `matrix ${state.columns}` }, make("thead", {}, head), make("tbody", {}, body)));
}

function matrixCell(row, rows, kind = "") {
  if (!row || row.score === null) return make("td", { class: `${kind} none` }, "–");
  const full = rows.find((other) => other.style.full);
  const lost = row.gap === null || row.noise || !full ? 0 : -row.gap / full.score;
  const cell = make("td", { class: `${kind} ${row.noise ? "muted" : ""}`, title:
    `${atBudget(row)}: ${withInterval(row)}${row.gap === null ? "" : `, ${signed(row.gap)} to full (${interval(row)})`}` },
    fixed(row.score, 0));
  cell.style.setProperty("--lost", `${Math.round(100 * Math.min(Math.max(lost, 0), 1))}%`);
  cell.classList.toggle("whole", row.style.full);
  return cell;
}

function radios(field, title, choices, chosen) {
  const buttons = choices.map(([value, text]) => toggle(text, value === chosen, () => {
    state[field] = value;
    render();
    byId(`${field}-${value}`).focus();
  }, { class: "chip", id: `${field}-${value}` }));
  return make("div", { class: "field", role: "group", "aria-label": title },
    make("span", {}, title), make("div", { class: "chips one" }, buttons));
}
