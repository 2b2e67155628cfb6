// The text in one card per method: tokens coloured by the heads that hold them.
"use strict";

const LEVELS = 8;
const MAP_HEIGHT = 108;

class Methods {
  constructor(data, box, tip) {
    Object.assign(this, { data, tip, layer: null, cards: [] });
    for (const method of data.methods) this.cards.push(this.card(method, box));
    this.show(null);
  }

  // KV heads that hold a token in the chosen layer or in all, and how many there are.
  held(method, token) {
    const { heads } = this.data, tokens = this.data.pieces.length;
    if (this.layer !== null) return [method.counts[this.layer * tokens + token], heads[this.layer]];
    let sum = 0, of = 0;
    heads.forEach((h, l) => { sum += method.counts[l * tokens + token]; of += h; });
    return [sum, of];
  }

  // The part of the entries of some spans that is held.
  part(method, spans) {
    let sum = 0, of = 0;
    for (const { start, stop } of spans) {
      for (let t = start; t < stop; t++) {
        const [count, heads] = this.held(method, t);
        sum += count;
        of += heads;
      }
    }
    return percent(sum / of);
  }

  card(method, box) {
    const card = make(box, "article", "card");
    make(card, "h3", "", method.name);
    const numbers = make(card, "p", "numbers");
    const map = this.map(method, make(card, "div", "map"));
    const text = make(card, "div", "text");
    text.tabIndex = 0;
    describe(text, "region",
      `The text as ${method.name} keeps it; left and right arrow go from token to token`);
    const spans = this.data.pieces.map((piece, i) => {
      const span = make(text, "span", "", this.data.folded[i] ?? piece);
      span.dataset.token = i;
      return span;
    });
    const made = { method, numbers, text, spans, ...map };
    text.addEventListener("scroll", () => this.scrolled(made), { passive: true });
    for (const kind of ["pointerover", "click"]) {
      text.addEventListener(kind, (event) => this.hover(event, made));
    }
    for (const kind of ["pointerleave", "blur"]) text.addEventListener(kind, () => this.leave());
    text.addEventListener("keydown", (event) => this.step(event, made));
    return made;
  }

  map(method, box) {
    const tokens = this.data.pieces.length, { heads } = this.data;
    for (const needle of this.data.needles) {
      const tick = make(box, "i", needle.asked ? "tick asked" : "tick");
      tick.style.left = `${(100 * needle.start) / tokens}%`;
      tick.style.width = `${(100 * (needle.stop - needle.start)) / tokens}%`;
    }
    const frame = make(box, "div", "rows"), canvas = make(frame, "canvas");
    describe(canvas, "img", `Tokens that ${method.name} keeps, layer by layer`);
    canvas.style.height = `${Math.max(MAP_HEIGHT, 4 * heads.length)}px`;
    // A row of a layer is two pixels of its own and, where there is room, a gap.
    const gap = heads.length <= 16 ? 1 : 0, step = 8 + gap;
    const wide = Math.min(tokens, 1600);
    paint(canvas, wide, heads.length * step - gap, (x, row) => {
      if (row % step === 8) return -1;
      const layer = Math.floor(row / step), from = Math.floor((x * tokens) / wide);
      const to = Math.max(from + 1, Math.floor(((x + 1) * tokens) / wide));
      let sum = 0;
      for (let t = from; t < to; t++) sum += method.counts[layer * tokens + t];
      return (255 * sum) / (to - from) / heads[layer];
    });
    const row = make(frame, "div", "row"), view = make(box, "div", "view");
    row.style.height = `${100 / heads.length}%`;
    box.addEventListener("click", (e) => {
      const area = canvas.getBoundingClientRect();
      this.goTo(Math.floor(((e.clientX - area.left) / area.width) * tokens));
    });
    return { row, view };
  }

  show(layer) {
    this.layer = layer;
    const marks = new Map();
    for (const needle of this.data.needles) {
      const mark = needle.asked ? "asked" : "needle";
      for (let t = needle.start; t < needle.stop; t++) marks.set(t, mark);
    }
    for (const card of this.cards) {
      card.spans.forEach((span, token) => {
        const [count, of] = this.held(card.method, token);
        span.className = `k${Math.ceil((LEVELS * count) / of)} ${marks.get(token) ?? ""}`;
      });
      card.row.hidden = layer === null;
      card.row.style.top = `${(100 * layer) / this.data.heads.length}%`;
      this.count(card);
      this.frame(card);
    }
  }

  // The numbers below a card's name, of the chosen layer or of all.
  count({ method, numbers }) {
    const { needles, pieces } = this.data, asked = needles.filter((n) => n.asked);
    const figures = [["kept", [{ start: 0, stop: pieces.length }]]];
    if (needles.length) figures.push(["of the needles", needles]);
    if (asked.length) figures.push(["of the one asked for", asked]);
    numbers.replaceChildren();
    for (const [name, spans] of figures) {
      make(make(numbers, "span"), "b", "", this.part(method, spans));
      numbers.lastChild.append(` ${name}`);
    }
  }

  // Which part of the text is in view, as a frame on its map.
  frame({ text, view }) {
    view.style.left = `${(100 * text.scrollTop) / text.scrollHeight}%`;
    view.style.width = `${100 * Math.min(1, text.clientHeight / text.scrollHeight)}%`;
  }

  scrolled(from) {
    const part = from.text.scrollTop / Math.max(1, from.text.scrollHeight - from.text.clientHeight);
    for (const card of this.cards) {
      const at = part * (card.text.scrollHeight - card.text.clientHeight);
      if (card !== from && Math.abs(card.text.scrollTop - at) > 1) card.text.scrollTop = at;
      this.frame(card);
    }
  }

  goTo(token) {
    const { text, spans } = this.cards[0];
    const span = spans[Math.min(Math.max(token, 0), spans.length - 1)];
    text.scrollTop = span.offsetTop - text.offsetTop - text.clientHeight / 3;
  }

  hover(event, card) {
    const token = event.target.dataset.token;
    if (token === undefined) return this.leave();
    this.point(Number(token), card, event.clientX, event.clientY);
  }

  // The left and right arrow go to the next token, from the first one in view.
  step(event, card) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const top = card.text.getBoundingClientRect().top;
    const inView = (span) => span.getBoundingClientRect().bottom > top;
    const from = this.tip.hidden ? card.spans.findIndex(inView) - way : this.token;
    const token = Math.min(Math.max(from + way, 0), card.spans.length - 1);
    card.spans[token].scrollIntoView({ block: "nearest" });
    const { left, bottom } = card.spans[token].getBoundingClientRect();
    this.point(token, card, left, bottom - 14);
  }

  // Marks a token in every card, and explains it beside a place in the window.
  point(token, card, x, y) {
    this.leave();
    this.token = token;
    this.marked = this.cards.map((c) => c.spans[token]);
    this.marked.forEach((span) => span.classList.add("same"));
    this.explain(token, card);
    const box = this.tip.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - box.width - 12);
    const below = y + 22;
    const top = below + box.height > innerHeight ? y - box.height - 14 : below;
    this.tip.style.left = `${Math.max(12, left)}px`;
    this.tip.style.top = `${Math.max(8, top)}px`;
  }

  explain(token, own) {
    const { heads, pieces } = this.data, tokens = pieces.length;
    this.tip.hidden = false;
    this.tip.replaceChildren();
    make(this.tip, "strong", "", JSON.stringify(pieces[token]));
    this.tip.append(` at position ${token.toLocaleString("en")}`);
    const table = make(this.tip, "table");
    for (const card of this.cards) {
      const row = make(table, "tr", card === own ? "own" : "");
      const [count, of] = this.held(card.method, token);
      make(row, "td", "", card.method.name);
      make(row, "td", "", `${count} of ${of} heads, ${percent(count / of)}`);
      const cells = make(make(row, "td"), "div", heads.length > 16 ? "cells many" : "cells");
      heads.forEach((h, l) => {
        const level = Math.ceil((LEVELS * card.method.counts[l * tokens + token]) / h);
        make(cells, "i", level ? `k${level}` : "");
      });
    }
  }

  leave() {
    this.tip.hidden = true;
    (this.marked ?? []).forEach((span) => span.classList.remove("same"));
  }
}
