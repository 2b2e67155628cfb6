// What is shown: protocol, tasks, length, budgets, methods.

function options(select, choices, chosen, changed) {
  for (const [label, values] of choices) {
    const made = values.map(([value, text]) =>
      make("option", { value, selected: value === chosen }, text));
    select.append(...(label ? [make("optgroup", { label }, made)] : made));
  }
  select.addEventListener("change", () => changed(select.value));
  return select;
}

const labelled = (text, control) => make("label", { class: "field" }, make("span", {}, text), control);

function toggle(content, pressed, clicked, attributes = {}) {
  return make("button", { type: "button", "aria-pressed": String(pressed), onclick: clicked, ...attributes },
    content);
}

function controls() {
  const holder = byId("controls");
  holder.replaceChildren();
  const board = state.board;
  if (data.boards.length > 1) {
    const titles = data.boards.map((one, i) => [String(i), one.title]);
    holder.append(labelled("Protocol", options(make("select"), [["", titles]],
      String(data.boards.indexOf(board)), (i) => choose(data.boards[i]))));
  }
  const groups = Object.keys(board.groups);
  const tasks = groups.flatMap((group) => board.groups[group]).map((name) => [`task\n${name}`, name]);
  const views = [["", [["overall\nall tasks", "all tasks"]]]];
  if (groups.length > 1) views.push(["Groups", groups.map((name) => [`group\n${name}`, name])]);
  if (tasks.length > 1) views.push(["Tasks", tasks]);
  if (views.length > 1) {
    holder.append(labelled("Tasks", options(make("select"), views, state.view, (value) => {
      state.view = value;
      render();
    })));
  }
  if (board.lengths.length > 1) {
    const lengths = [["", "all lengths"], ...board.lengths.map((n) => [String(n), `${count(n)} tokens`])];
    const chosen = state.length === null ? "" : String(state.length);
    holder.append(labelled("Length", options(make("select"), [["", lengths]], chosen, (value) => {
      state.length = value === "" ? null : Number(value);
      render();
    })));
  }
  if (board.budgets.length > 1) {
    const chips = board.budgets.map((budget) =>
      toggle(budget, !state.hiddenBudgets.has(budget), (event) => {
        flip(state.hiddenBudgets, budget);
        event.currentTarget.setAttribute("aria-pressed", String(!state.hiddenBudgets.has(budget)));
        render();
      }, { class: "chip" }));
    holder.append(make("div", { class: "field", role: "group", "aria-label": "Budgets" },
      make("span", {}, "Budgets"), make("div", { class: "chips" }, chips)));
  }
  holder.parentElement.classList.toggle("empty", !holder.childElementCount);
}

function flip(set, value) {
  if (!set.delete(value)) set.add(value);
}

function choose(board) {
  state.board = board;
  const known = (view) => `${view.kind}\n${view.name}` === state.view;
  if (!board.views.some(known)) state.view = "overall\nall tasks";
  if (!board.lengths.includes(state.length)) state.length = null;
  state.hiddenBudgets.clear();
  state.budget = state.needle = null;
  controls();
  legend();
  render();
}

// The legend is the filter of methods; pointing at one brings it out in the charts.
function legend() {
  const present = new Set(state.board.views.flatMap((view) => unpack(view.rows).map((row) => row.method)));
  for (const row of state.board.texts.flatMap((text) => unpack(text.rows))) present.add(row.method);
  const buttons = [...present].sort((a, b) => a - b).map((method) => {
    const style = data.methods[method];
    return toggle([lineKey(style), make("span", {}, style.label)], !state.hiddenMethods.has(method), (event) => {
      flip(state.hiddenMethods, method);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hiddenMethods.has(method)));
      render();
    }, {
      onpointerenter: () => emphasise(method),
      onpointerleave: () => emphasise(null),
      onfocus: () => emphasise(method),
      onblur: () => emphasise(null),
    });
  });
  const every = (hide) => () => {
    state.hiddenMethods = new Set(hide ? [...present].filter((m) => !data.methods[m].full) : []);
    legend();
    render();
  };
  byId("legend").replaceChildren(
    make("button", { type: "button", class: "plain", onclick: every(false) }, "all"),
    make("button", { type: "button", class: "plain", onclick: every(true) }, "none"), ...buttons);
}

function emphasise(method) {
  for (const group of document.querySelectorAll("[data-method]")) {
    group.classList.toggle("dim", method !== null && group.dataset.method !== String(method));
    group.classList.toggle("bright", method !== null && group.dataset.method === String(method));
  }
}
