// Figures and tables of the engine, from /metrics, /cache/stats and /debug/rows.

import { Chart } from "./charts.js";
import { $, bytes, count, h, ms, percent, ratio, setText, short, Table } from "./dom.js";
import { recent } from "./steps.js";

const SECONDS = 120;
const WINDOW = 60; // samples of latencies and rates of hits
const LATENCIES = ["time_to_first_token_seconds", "inter_token_latency_seconds"];
const LINES = [
  ["generated", "device", (it) => it.sum("generation_tokens_total")],
  ["prompt, computed", "warn", (it) => it.sum("prompt_tokens_total") - it.sum("prefix_cache_hits_total")],
  ["prompt, cached", "both", (it) => it.sum("prefix_cache_hits_total")],
];

const WAYS = { load: "host → device", offload: "device → host", prefetch: "store → host", upload: "host → store" };

const history = []; // {at_s, samples}, oldest first
const points = []; // [at_s, ...rates]
const tables = {};
let chart;

const add = (...stats) => Object.fromEntries(Object.keys(stats[0] ?? {}).map((name) => [name, stats.reduce((sum, each) => sum + each[name], 0)]));

function figure(name, title) {
  const value = h("dd", { id: `figure-${name}` }, "–");
  $("summary").append(h("div", { title }, h("dt", {}, name), value));
}

function tell(name, value, unit = "") {
  const place = $(`figure-${name}`);
  const text = unit ? `${value} ${unit}` : value;
  if (place.textContent !== text) place.replaceChildren(value, ...(unit ? [h("small", {}, unit)] : []));
}

const num = (head, read) => ({ head, num: true, read });
const word = (head, read) => ({ head, read });

export function start() {
  const figures = {
    running: "Requests in the workers' batches",
    waiting: "Requests that wait for a place in a batch",
    "tokens/s": "Generated tokens per second, now",
    "steps/s": "Steps per second, now",
    "KV held": "Share of the device's pages that running requests hold",
    cached: "Share of prompt tokens found in the cache, of the last minute or, without requests, since the start",
    "accept length": "Tokens that a step with drafts gave on average, since the workers started",
    preemptions: "Requests preempted for lack of pages, since the start",
    "TTFT p50": "Time to the first token, median of the last minute",
    "TTFT p99": "Time to the first token, 99th percentile of the last minute",
    "ITL p50": "Time between tokens, median of the last minute",
    "ITL p99": "Time between tokens, 99th percentile of the last minute",
  };
  for (const [name, title] of Object.entries(figures)) figure(name, title);
  chart = new Chart("tokens-chart", SECONDS, LINES.map(([label, color]) => ({ label, color })), {
    scales: { y: { range: (u, min, max) => [0, Math.max(10, max * 1.1)] } },
    axes: [{ values: (u, values) => values.map(short) }],
  });
  const share = (name) => ({ head: "", wide: true, bar: (row) => [[[row.tone ?? name, row.value]], row.whole, percent(row.value, row.whole)] });
  tables.gate = new Table($("gate"), [
    word("decision", (row) => row.labels.decision), word("reason", (row) => row.labels.reason), share("rest"),
    num("share", (row) => percent(row.value, row.whole)), num("steps", (row) => count(row.value)),
  ]);
  tables.misses = new Table($("misses"), [
    word("reason", (row) => row.labels.reason), share("rest"),
    num("share", (row) => percent(row.value, row.whole)), num("requests", (row) => count(row.value)),
  ]);
  tables.parts = new Table($("parts"), [
    word("part", (row) => row.part), word("turn", (row) => row.turn), share("rest"),
    num("chats", (row) => count(row.chats)), num("tokens computed", (row) => count(row.value)),
  ], "no chats yet");
  tables.tiers = new Table($("tiers"), [
    word("tier", (row) => row.tier),
    { head: "", wide: true, bar: (row) => [row.parts, row.whole, row.label] },
    num("pages", (row) => count(row.num_pages)), num("held", (row) => row.held), num("evictable", (row) => row.evictable),
    num("free", (row) => row.free), num("evicted", (row) => count(row.num_evicted)),
  ]);
  tables.copies = new Table($("copies"), [
    word("copy", (row) => row.copy), word("", (row) => WAYS[row.copy] ?? ""), num("wanted", (row) => count(row.wanted)), num("arrived", (row) => count(row.fulfilled)),
    num("in flight", (row) => count(row.flight)), num("not", (row) => count(row.unfulfilled)),
    num("bytes", (row) => bytes(row.bytes)), num("rate", (row) => (row.seconds ? `${bytes(row.bytes / row.seconds)}/s` : "–")),
  ]);
  tables.drafts = new Table($("drafts"), [
    word("source", (row) => row.source), num("steps", (row) => count(row.steps)), num("drafts", (row) => count(row.proposed)),
    num("accepted", (row) => count(row.accepted)), num("rate", (row) => percent(row.accepted, row.proposed)),
    num("length", (row) => ratio(row.steps + row.accepted, row.steps)),
  ], "no drafts yet");
  tables.positions = new Table($("positions"), [
    word("position", (row) => row.position), share("both"), num("accepted", (row) => count(row.value)),
    num("of steps", (row) => percent(row.value, row.whole)),
  ], "no drafts yet");
  tables.rows = new Table($("rows"), [
    num("row", (row) => String(row.row)), num("request", (row) => String(row.uid)), word("state", (row) => row.state),
    num("prompt", (row) => count(row.num_prompt)), num("cached", (row) => (row.num_cached == null ? "–" : count(row.num_cached))), word("from", (row) => row.source),
    num("computed", (row) => count(row.num_computed)),
    { head: "generated", bar: (row) => [[["good", row.num_generated]], row.num_generated + row.num_left, `${row.num_generated} of at most ${row.num_generated + row.num_left} tokens`] },
    num("", (row) => count(row.num_generated)), num("left", (row) => count(row.num_left)), num("pages", (row) => count(row.num_pages)), num("window", (row) => count(row.num_window_pages)),
    num("drafts", (row) => (row.num_drafts ? percent(row.num_accepted, row.num_drafts) : "–")),
    word("grammar", (row) => (row.has_grammar ? "yes" : "")),
  ], "no row runs");
}

// Seconds below which this share of a histogram's new values are, interpolated within a bucket.
function quantile(name, share, now, before) {
  const buckets = now.all(`${name}_bucket`).map(({ labels, value }) => ({
    le: labels.le === "+Inf" ? Infinity : Number(labels.le),
    value: value - (before?.sum(`${name}_bucket`, { le: labels.le }) ?? 0),
  })).sort((a, b) => a.le - b.le);
  const target = share * (buckets.at(-1)?.value ?? 0);
  if (!target) return null;
  let low = 0;
  let below = 0;
  for (const { le, value } of buckets) {
    if (value >= target) return le === Infinity ? low : low + ((le - low) * (target - below)) / (value - below);
    low = le;
    below = value;
  }
  return null;
}

function summary(it, before, seconds) {
  tell("running", count(it.sum("num_requests_running")));
  tell("waiting", count(it.sum("num_requests_waiting")));
  tell("tokens/s", points.length ? short(Math.max(0, points.at(-1)[1])) : "–");
  tell("steps/s", seconds ? short(recent().length) : "–");
  tell("KV held", (100 * it.sum("kv_cache_usage_perc")).toFixed(1), "%");
  const grown = (name) => it.sum(name) - (before?.sum(name) ?? 0);
  const queries = grown("prefix_cache_queries_total");
  const [hits, of] = queries ? [grown("prefix_cache_hits_total"), queries] : [it.sum("prefix_cache_hits_total"), it.sum("prefix_cache_queries_total")];
  tell("cached", of ? ((100 * hits) / of).toFixed(1) : "–", of ? "%" : "");
  const length = it.sum("spec_decode_num_drafts_total") && it.sum("spec_accept_length", { cache_source: "all" });
  tell("accept length", length ? length.toFixed(2) : "–");
  tell("preemptions", count(it.sum("num_preemptions_total")));
  LATENCIES.forEach((name, i) => {
    for (const share of [50, 99]) {
      const found = quantile(name, share / 100, it, before);
      tell(`${["TTFT", "ITL"][i]} p${share}`, found == null ? "–" : ms(found), found == null ? "" : "ms");
    }
  });
}

function shares(list, tones = {}, by = "value") {
  const kept = list.filter((each) => each[by]).sort((a, b) => b[by] - a[by]);
  const whole = kept.reduce((sum, each) => sum + each[by], 0);
  return kept.map((each) => ({ ...each, whole, tone: tones[each.labels?.decision] }));
}

function drafts(it) {
  const of = (name, source) => it.sum(`spec_decode_num_${name}_total`, { cache_source: source });
  const sources = it.all("spec_decode_num_drafts_total").map((each) => each.labels.cache_source);
  const rows = sources.map((source) => ({
    source, steps: of("drafts", source), proposed: of("draft_tokens", source), accepted: of("accepted_tokens", source),
  }));
  tables.drafts.show(rows.filter((row) => row.steps));
  const steps = rows.reduce((sum, row) => sum + row.steps, 0);
  const positions = it.all("spec_decode_num_accepted_tokens_per_pos_total").map(({ labels, value }) => ({ position: labels.position, value, whole: steps }));
  tables.positions.show(steps ? positions : []);
}

function copies(it) {
  tables.copies.show(it.all("cache_wanted_tokens_total").map(({ labels: { copy }, value }) => ({
    copy, wanted: value,
    fulfilled: it.sum("cache_fulfilled_tokens_total", { copy }),
    flight: it.sum("cache_in_flight_tokens", { copy }),
    unfulfilled: it.sum("cache_unfulfilled_tokens_total", { copy }),
    bytes: it.sum("kv_offload_total_bytes_total", { copy }),
    seconds: it.sum("kv_offload_total_time_total", { copy }),
  })));
  const reasons = it.all("cache_unfulfilled_tokens_total").filter((each) => each.value);
  setText($("unfulfilled"), reasons.map(({ labels, value }) => `${NAMES[labels.copy] ?? labels.copy} not done, ${labels.reason}: ${count(value)}`).join(" · "));
}

function parts(it) {
  const rows = it.all("chat_cache_misses_total").map(({ labels: { part, turn }, value }) => ({
    part, turn, chats: value, value: it.sum("chat_missed_tokens_total", { part, turn }),
  }));
  tables.parts.show(shares(rows.filter((row) => row.chats)));
}

export function metrics(samples) {
  const at_s = performance.now() / 1000;
  const last = history.at(-1);
  history.push({ at_s, samples });
  if (history.length > WINDOW + 1) history.shift();
  if (last) {
    const seconds = at_s - last.at_s;
    points.push([at_s, ...LINES.map(([, , read]) => (read(samples) - read(last.samples)) / seconds)]);
    while (points[0][0] < at_s - SECONDS) points.shift();
  }
  summary(samples, history.length > 1 ? history[0].samples : null, last ? at_s - last.at_s : 0);
  chart.show([points.map((each) => each[0] - at_s), ...LINES.map((_, i) => points.map((each) => Math.max(0, each[i + 1])))]);
  tables.gate.show(shares(samples.all("graph_gate_total"), { replay: "good", eager: "device", defer: "bad" }));
  tables.misses.show(shares(samples.all("cache_misses_total")));
  parts(samples);
  copies(samples);
  drafts(samples);
}

export function tiers(stats) {
  const rows = [];
  for (const tier of ["device", "windows", "snapshots", "host"]) {
    const each = add(...stats.replicas.map((replica) => replica.tiers[tier]).filter(Boolean));
    if (!("num_pages" in each)) continue;
    const held = each.num_pages - each.num_free - each.num_evictable;
    const label = `${held} held, ${each.num_evictable} evictable, ${each.num_free} free`;
    const texts = { held: count(held), evictable: count(each.num_evictable), free: count(each.num_free) };
    rows.push({ tier, ...each, ...texts, label, whole: each.num_pages, parts: [["held", held], ["evictable", each.num_evictable]] });
  }
  const stores = stats.replicas.map((replica) => replica.tiers.store).filter(Boolean);
  if (stores.length) {
    const store = stores.reduce((a, b) => (a.num_pages >= b.num_pages ? a : b));
    const texts = { held: bytes(store.num_bytes), evictable: `${count(store.num_hits)} hits`, free: `${count(store.num_misses)} misses` };
    rows.push({ tier: "store", ...store, ...texts, label: store.last_error, whole: 1, parts: [["store", store.num_pages ? 1 : 0]] });
  }
  tables.tiers.show(rows);
}

export function rows(reply) {
  const all = reply.replicas.flatMap((each) => each.rows);
  const by = (state) => all.filter((row) => row.state === state).length;
  setText($("rows-count"), all.length ? `${all.length} running: ${by("decode")} decode, ${by("prefill")} prefill, ${by("load")} load` : "");
  tables.rows.show(all);
}
