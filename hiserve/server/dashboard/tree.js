// The radix tree, by tier.

import { $, bar, count, h } from "./dom.js";

const closed = new Set(); // digests
let shown = "";
let last = null;

const SORTS = { D: "device", DH: "both", H: "host" };
const sort = (state) => SORTS[state] ?? "moving";

// Tokens of a node and below it, by tier.
function weigh(nodes) {
  const weights = new Map(nodes.map((node) => [node.digest, {}]));
  for (const node of [...nodes].reverse()) {
    const own = weights.get(node.digest);
    if (node.num_tokens) own[sort(node.state)] = (own[sort(node.state)] ?? 0) + node.num_tokens;
    const above = weights.get(node.parent);
    if (above) for (const [tier, tokens] of Object.entries(own)) above[tier] = (above[tier] ?? 0) + tokens;
  }
  return weights;
}

const total = (weight) => Object.values(weight).reduce((sum, each) => sum + each, 0);

function line(node, weight, whole, children, hint) {
  const parts = ["device", "both", "host", "moving"].map((name) => [name, weight[name] ?? 0]);
  const label = parts.filter(([, tokens]) => tokens).map(([name, tokens]) => `${name} ${tokens}`).join(", ");
  const name = node.depth ? node.digest.slice(0, 8) : `namespace ${node.digest.slice(0, 8)}`;
  const item = h("div", {
    class: "node", role: "treeitem", "aria-level": node.depth + 1, tabindex: -1, "data-digest": node.digest, title: hint,
    "aria-expanded": children ? String(!closed.has(node.digest)) : undefined,
  },
    h("span", { class: "name" }, name),
    bar(parts, whole, label),
    h("span", { "data-tokens": node.num_tokens }, count(node.num_tokens)),
    h("span", {}, node.state || "–"),
    h("span", {}, node.num_locks || node.num_host_locks ? `${node.num_locks} + ${node.num_host_locks}` : "–"),
    h("span", {}, count(node.last_step)));
  item.firstChild.style.paddingLeft = `${0.9 * node.depth}rem`;
  return item;
}

export function show(trees) {
  const text = JSON.stringify(trees) + [...closed].join();
  if (text === shown) return; // focus and selection stay
  shown = text;
  last = trees;
  const place = $("tree");
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.digest : null;
  const heads = ["prefix", "tokens below", "tokens", "tier", "locks", "last step"];
  const lines = [h("div", { class: "node head", "aria-hidden": "true" }, ...heads.map((each) => h("span", {}, each)))];
  for (const { nodes, replica } of trees.replicas) {
    if (trees.replicas.length > 1) lines.push(h("h3", {}, `Worker ${replica}`));
    const weights = weigh(nodes);
    const whole = Math.max(1, ...nodes.filter((node) => !node.parent).map((node) => total(weights.get(node.digest))));
    const below = new Map();
    for (const node of nodes) (below.get(node.parent) ?? below.set(node.parent, []).get(node.parent)).push(node);
    const put = (node) => {
      const children = below.get(node.digest) ?? [];
      const hidden = node.num_children - children.length;
      const hint = hidden > 0 ? `${hidden} children deeper than shown` : "";
      lines.push(line(node, weights.get(node.digest), whole, children.length, hint));
      if (!closed.has(node.digest)) children.forEach(put);
    };
    nodes.filter((node) => !node.parent).forEach(put);
  }
  if (lines.length === 1) lines.push(h("p", { class: "line" }, "The tree is empty."));
  const top = place.scrollTop;
  place.replaceChildren(...lines);
  place.scrollTop = top;
  const items = [...place.querySelectorAll("[role=treeitem]")];
  const again = items.find((each) => each.dataset.digest === focused);
  if (again) again.focus({ preventScroll: true });
  const first = again ?? items[0];
  if (first) first.tabIndex = 0;
}

function toggle(item, open) {
  if (!item.hasAttribute("aria-expanded")) return;
  const { digest } = item.dataset;
  if (open ?? closed.has(digest)) closed.delete(digest);
  else closed.add(digest);
  if (last) show(last);
}

export function start() {
  const place = $("tree");
  place.addEventListener("click", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (item) {
      item.focus({ preventScroll: true });
      toggle(item);
    }
  });
  place.addEventListener("keydown", (event) => {
    const items = [...place.querySelectorAll("[role=treeitem]")];
    const at = items.indexOf(document.activeElement);
    if (at < 0) return;
    const move = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (move !== undefined) items[Math.min(Math.max(move, 0), items.length - 1)].focus();
    else if (event.key === "ArrowRight") toggle(items[at], true);
    else if (event.key === "ArrowLeft") toggle(items[at], false);
    else if (event.key === "Enter" || event.key === " ") toggle(items[at]);
    else return;
    event.preventDefault();
  });
  place.addEventListener("focusin", (event) => {
    for (const each of place.querySelectorAll("[tabindex='0']")) each.tabIndex = -1;
    event.target.tabIndex = 0;
  });
}
