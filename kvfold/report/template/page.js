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
  const perplexity = unpack(state.board.perplexity), rows = currentRows();
  const scored = state.board.views.some((view) => view.rows.length);
  for (const id of ["pareto", "table"]) byId(id).hidden = !scored;
  byId("perplexity").hidden = !perplexity.length;
  byId("pareto-lead").textContent = lead();
  if (scored) chart(byId("chart"), rows, false);
  if (perplexity.length) chart(byId("perplexity-chart"), perplexity, true);
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

// Below the title of every table, the text that its needles were hidden in, or that was read.
function haystacks() {
  byId("table-haystack").textContent = haystackOf(currentView());
  byId("where-haystack").textContent = haystackOf(findView("overall", "all tasks", null));
  byId("needle-haystack").textContent = haystackOf(findView("task", state.needle, null));
  byId("perplexity-source").textContent = state.board.source ? `Text: ${state.board.source}.` : "";
}

function render() {
  header();
  strips();
  charts();
  table(byId("summary"), currentRows(), false);
  matrix();
  needles();
  haystacks();
  if (state.board.perplexity.length) table(byId("perplexity-table"), unpack(state.board.perplexity), true);
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
