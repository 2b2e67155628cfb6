// The page from its state.

function header() {
  const board = state.board, rows = viewRows("overall", "all tasks", null);
  byId("claim").textContent = board.claim;
  byId("evidence").textContent = board.evidence;
  const others = data.boards.filter((other) => other !== board);
  byId("others").replaceChildren(...others.map((other) => make("button", { type: "button", onclick: () => {
    choose(other);
    byId("others").querySelector("button").focus();
  } }, other.claim)));
  const methods = new Set(rows.filter((row) => !row.style.baseline).map((row) => row.method)).size;
  const tasks = Object.values(board.groups).flat().length;
  const samples = rows.reduce((sum, row) => sum + row.samples, 0);
  byId("kicker").textContent = ["kvfold report", board.facts[0][1][0].split(",")[0], board.title,
    plural(methods, "method"), plural(tasks, "task"), `${count(samples)} samples run`].join("  ·  ");
}

function caveats() {
  const list = state.board.caveats;
  byId("caveats").hidden = !list.length;
  byId("caveat-list").replaceChildren(...list.map(({ about, lines }) =>
    make("details", { open: lines.length < 7 }, make("summary", {}, about, make("span", {}, count(lines.length))),
      make("ul", {}, lines.map((text) => make("li", {}, text))))));
}

function facts() {
  byId("fact-list").replaceChildren(...state.board.facts.flatMap(([name, values]) =>
    [make("dt", {}, name), ...values.map((value) => make("dd", {}, value))]));
}

function charts() {
  const rows = currentRows();
  const scored = state.board.views.some((view) => view.rows.length);
  for (const id of ["pareto", "table"]) byId(id).hidden = !scored;
  byId("pareto-lead").textContent = lead();
  if (scored) chart(byId("chart"), rows, false);
  texts();
}

// Perplexities: a chart and a table for each text. Those of a board stay, so that open tables do.
let textsOf = null;

function texts() {
  const given = state.board.texts;
  byId("perplexity").hidden = !given.length;
  if (textsOf !== state.board) byId("texts").replaceChildren(...given.flatMap(({ name }) => [
    make("h3", {}, name), make("div", { class: "chart" }),
    make("details", { class: "more" }, make("summary", {}, "As a table"),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Perplexity of ${name}` })),
  ]));
  textsOf = state.board;
  const charts = byId("texts").querySelectorAll(".chart"), tables = byId("texts").querySelectorAll(".scroll");
  given.forEach(({ rows }, index) => {
    chart(charts[index], unpack(rows), true);
    table(tables[index], unpack(rows), true);
  });
}

function lead() {
  const { board, length, view } = state, [kind, name] = view.split("\n");
  const where = length === null ? "" : ` at ${count(length)} tokens`;
  const tasks = kind === "group" ? board.groups[name] : kind === "task" ? [name] : [];
  const weak = tasks.length > 0 && tasks.every((task) => board.weak.includes(task));
  return `Mean over ${name}${where}, ${board.title}. Bars are 95 % intervals; the broad line is the Pareto frontier ` +
    "of score and bytes. Methods neither on it nor leading at a budget are faint." +
    ` ${haystackOf(currentView())}` +
    (weak ? " The full cache itself is near guessing here, so differences mean little." : "");
}

const haystackOf = (view) => (view?.haystack ? `Haystack: ${view.haystack}.` : "");

// Below the title of every table, the text that its needles were hidden in.
function haystacks() {
  byId("table-haystack").textContent = haystackOf(currentView());
  byId("where-haystack").textContent = haystackOf(findView("overall", "all tasks", null));
  byId("needle-haystack").textContent = haystackOf(findView("task", state.needle, null));
}

function render() {
  header();
  strips();
  charts();
  table(byId("summary"), currentRows(), false);
  matrix();
  needles();
  haystacks();
  caveats();
  facts();
}

controls();
legend();
render();

let drawnAt = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  if (drawnAt === document.documentElement.clientWidth) return;
  drawnAt = document.documentElement.clientWidth;
  charts();
});
window.addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
