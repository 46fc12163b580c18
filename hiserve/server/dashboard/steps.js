// The steps of the last seconds: one point each, its colour by the decision of the graph gate.

import { ask, json } from "./api.js";
import { Chart } from "./charts.js";
import { $, count, ms, setText } from "./dom.js";

const SECONDS = 30;
const MOST = 8192;
const KINDS = ["replay", "eager", "defer"];

let steps = []; // oldest first, of all workers
let since = 0;
let now = 0;
let selected = null; // a step, or null for the latest
let chart;

function words(step) {
  const parts = [`step ${step.step}`];
  if (step.of > 1) parts.unshift(`worker ${step.replica}`);
  parts.push(`${ms(step.end_s - step.begin_s)} ms`, step.decision ? `${step.decision} ${step.reason}` : "copies only");
  parts.push(`${step.num_rows} rows`, `${count(step.num_tokens)} tokens`);
  if (step.num_prefill) parts.push(`${count(step.num_prefill)} of prompts`);
  parts.push(`${step.num_emitted} drawn`);
  if (step.num_drafts) parts.push(`${step.num_accepted} of ${step.num_drafts} drafts accepted`);
  if (step.mask_s) parts.push(`masks ${ms(step.mask_s)} ms`);
  if (step.num_copies) parts.push(`copies ${step.num_copies}`);
  if (step.fault) parts.push(step.fault);
  return parts.join(" · ");
}

function tell() {
  const step = selected ?? steps.at(-1);
  setText($("step-line"), step ? words(step) : "No step in the last 30 s.");
}

function select(index) {
  selected = index == null ? null : steps[index] ?? null;
  tell();
}

export function start() {
  chart = new Chart("steps-chart", SECONDS, [
    { label: "tokens (right)", color: "moving", scale: "tokens", filled: true, width: 0.6, paths: uPlot.paths.stepped({ align: 1 }) },
    { label: "replay", color: "good", dots: true },
    { label: "eager", color: "device", dots: true },
    { label: "deferred or failed", color: "bad", dots: true },
    { label: "wait for masks", color: "warn", dots: true },
  ], {
    height: 170,
    scales: { y: { range: (u, min, max) => [0, Math.max(1, max * 1.1)] }, tokens: { range: (u, min, max) => [0, Math.max(1, max * 1.1)] } },
    axes: [{ size: 54, values: (u, values) => values.map((value) => `${value} ms`) }, { side: 1, scale: "tokens", grid: { show: false } }],
    onCursor: select,
  });
  $("steps-chart").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !steps.length) return;
    event.preventDefault();
    const at = selected ? steps.indexOf(selected) : steps.length;
    select(Math.min(Math.max(at + by, 0), steps.length - 1));
  });
  $("trace").addEventListener("click", async () => {
    const url = URL.createObjectURL(await (await ask("debug/steps?format=chrome")).blob());
    const link = Object.assign(document.createElement("a"), { href: url, download: "hiserve-steps.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
}

export async function read() {
  const reply = await json(`debug/steps?since=${since}`);
  if (!reply.replicas.length) return;
  const of = reply.replicas.length;
  const fresh = reply.replicas.flatMap((each) => each.steps.map((step) => ({ ...step, replica: each.replica, of })));
  since = now = reply.until_s;
  steps = steps.concat(fresh).filter((step) => step.end_s > now - SECONDS).slice(-MOST).sort((a, b) => a.end_s - b.end_s);
}

export function show() {
  const took = (step) => 1000 * (step.end_s - step.begin_s);
  const of = (kind) => steps.map((step) => ((step.fault ? "defer" : step.decision) === kind ? took(step) : null));
  chart.show([
    steps.map((step) => step.end_s - now),
    steps.map((step) => step.num_tokens),
    ...KINDS.map(of),
    steps.map((step) => (step.mask_s ? 1000 * step.mask_s : null)),
  ]);
  tell();
}

// Steps of the last second: for the summary.
export const recent = () => steps.filter((step) => step.end_s > now - 1);
