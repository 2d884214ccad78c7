// Elements from plain values. Text only ever becomes a text node, so nothing that a team or a model says can turn into
// markup; and how numbers, money and moments read.

export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function card(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), children);
}

export function figure(label, value, hint = null) {
  const lines = [el("p", { class: "label" }, label), el("p", { class: "figure" }, value)];
  return el("div", { class: "card" }, lines, hint === null ? null : el("p", { class: "hint" }, hint));
}

// columns: [heading, row => cell, isNumber]
export function table(caption, columns, rows) {
  if (rows.length === 0) return el("p", { class: "hint" }, `${caption}: none yet.`);
  const head = columns.map(([heading, , isNumber]) => el("th", { scope: "col", class: isNumber && "number" }, heading));
  const body = rows.map((row) =>
    el("tr", {}, columns.map(([, cell, isNumber]) => el("td", { class: isNumber && "number" }, cell(row)))),
  );
  const whole = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

export function pill(text, mood) {
  return el("span", { class: `pill ${mood}` }, text);
}

export function count(value) {
  return Number(value).toLocaleString("en-US");
}

export function usd(value) {
  const amount = Number(value);
  const digits = amount !== 0 && Math.abs(amount) < 1 ? 6 : 2;
  return (amount < 0 ? "-$" : "$") + Math.abs(amount).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: digits });
}

export function day(text) {
  return text ? text.slice(0, 10) : "never";
}

// What a report says of tokens and money, as columns of a table.
export const SUMS = [
  ["Requests", (row) => count(row.requests), true],
  ["Input", (row) => count(row.input_tokens), true],
  ["Cached", (row) => count(row.cached_input_tokens), true],
  ["Output", (row) => count(row.output_tokens), true],
  ["Cost", (row) => usd(row.cost_usd), true],
];
