// Maps of length and depth: a card for a method, a map for a budget.

function needles() {
  const maps = state.board.needles, tasks = [...new Set(maps.map((map) => map.task))];
  byId("needles").hidden = !maps.length;
  if (!maps.length) return;
  state.needle ??= tasks[0];
  byId("needle-choices").replaceChildren(...(tasks.length > 1
    ? [radios("needle", "Task", tasks.map((task) => [task, task]), state.needle)] : []));
  const steps = [0, 25, 50, 75, 100].map((value) => shade(make("i"), value));
  byId("needle-scale").replaceChildren("never found", ...steps, "always found");
  const own = maps.filter((map) => map.task === state.needle &&
    isShown(map) && (state.length === null || map.lengths.includes(state.length)));
  const several = (method) => own.filter((map) => map.method === method).length > 1;
  const methods = [...new Set(own.map((map) => map.method))]
    .sort((a, b) => Number(several(a)) - Number(several(b)) || a - b);
  byId("needle-maps").replaceChildren(...methods.map((method) =>
    make("figure", { "data-method": method }, make("figcaption", {}, named(data.methods[method])),
      make("div", { class: "maps" }, [null, ...state.board.budgets].map((budget) =>
        own.filter((map) => map.method === method && map.budget === budget).map(heatmap)).flat()))));
}

const shade = (element, value) => {
  element.style.setProperty("--found", `${Math.round(value)}%`);
  return element;
};

function heatmap(map) {
  const thousands = (n) => (n >= 1000 ? `${Number((n / 1000).toFixed(1))}k` : n);
  const title = map.budget === null ? "all" : map.budget;
  const head = make("tr", {}, make("th", {}, title), map.lengths.map((n) => make("th", { scope: "col" }, thousands(n))));
  const body = map.depths.map((depth, line) => make("tr", {},
    make("th", { scope: "row" }, line === 0 || line === map.depths.length - 1 ? `${fixed(depth, 0)} %` : ""),
    map.lengths.map((n, i) => heatCell(map.values[line][i], `${count(n)} tokens, depth ${fixed(depth, 0)} %`))));
  return make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, body));
}

function heatCell(value, where) {
  if (value === null) return make("td", { class: "none", title: `${where}: not run` });
  return shade(make("td", { title: `${where}: ${fixed(value, 0)} %` },
    make("span", { class: "hidden" }, fixed(value, 0))), value);
}
