// Elements and figures. Nothing is written as HTML: texts stay texts.

export const $ = (id) => document.getElementById(id);

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Segments of a whole: [[class, amount], ...].
export function bar(parts, total, label = "") {
  const node = h("div", { class: "bar", role: "img", "aria-label": label });
  fillBar(node, parts, total, label);
  return node;
}

export function fillBar(node, parts, total, label = "") {
  while (node.children.length < parts.length) node.append(h("span"));
  while (node.children.length > parts.length) node.lastChild.remove();
  parts.forEach(([name, amount], i) => {
    const part = node.children[i];
    if (part.className !== name) part.className = name;
    const width = total ? `${(100 * amount) / total}%` : "0";
    if (part.style.width !== width) part.style.width = width;
  });
  if (node.getAttribute("aria-label") !== label) node.setAttribute("aria-label", label);
}

// A table whose cells are reused. A column: {head, num, read(row) -> text, or bar(row) -> [parts, total, label]}.
export class Table {
  constructor(table, columns, empty = "none yet") {
    this.columns = columns;
    this.empty = empty;
    const heads = columns.map((each) => h("th", { class: each.num ? "num" : "", scope: "col" }, each.head));
    this.body = h("tbody");
    table.replaceChildren(h("thead", {}, h("tr", {}, ...heads)), this.body);
  }

  show(rows) {
    const { body, columns } = this;
    if (!rows.length) {
      if (!body.querySelector(".none")) {
        body.replaceChildren(h("tr", {}, h("td", { class: "none", colspan: columns.length }, this.empty)));
      }
      return;
    }
    if (body.querySelector("td.none")) body.replaceChildren();
    while (body.rows.length > rows.length) body.lastChild.remove();
    while (body.rows.length < rows.length) body.append(this.line());
    rows.forEach((row, i) => {
      const cells = body.rows[i].cells;
      columns.forEach((column, j) => {
        if (column.bar) fillBar(cells[j].firstChild, ...column.bar(row));
        else setText(cells[j], column.read(row));
      });
    });
  }

  line() {
    return h("tr", {}, ...this.columns.map((each) =>
      each.bar ? h("td", { class: each.wide ? "wider" : "" }, h("div", { class: "bar", role: "img" }))
        : h("td", { class: each.num ? "num" : "word" })));
  }
}

const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => COUNT.format(value);
export const short = (value) => (Math.abs(value) < 10_000 ? COUNT.format(value) : SHORT.format(value));
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export const ratio = (part, whole, digits = 2) => (whole ? (part / whole).toFixed(digits) : "–");

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export const ms = (seconds) => (seconds < 0.0995 ? (1000 * seconds).toFixed(seconds < 0.00995 ? 2 : 1) : (1000 * seconds).toFixed(0));
