// The page: views, the key, and one reading of the server a second while somebody looks.

import { ask, json, key, mode, Refused } from "./api.js";
import { resizeAll } from "./charts.js";
import { $, setText } from "./dom.js";
import * as panes from "./panes.js";
import * as playground from "./playground.js";
import { Samples } from "./prometheus.js";
import * as steps from "./steps.js";
import * as tree from "./tree.js";

const PERIOD_MS = 1000;
const MOST_MS = 15_000; // after failures
const TREE_EVERY = 3; // readings
const INFO_EVERY = 30;

let num = 0;
let timer = null;
let isPaused = false;
let isReading = false;
let isReady = false;
let delay = PERIOD_MS;

const view = () => (location.hash === "#playground" ? "playground" : "engine");
const needsKey = () => mode !== "none" && !key.get();
const isWatched = () => view() === "engine" && !document.hidden && !isPaused && !needsKey() && mode !== "absent";

function notice(text) {
  $("notice").hidden = !text;
  setText($("notice"), text);
}

function state(text, tone) {
  setText($("state"), text);
  $("state").className = tone;
}

async function info() {
  const found = await json("server_info");
  setText($("model"), found.served_model_name);
  document.title = `${found.served_model_name} · hiserve`;
  const workers = found.workers.length === 1 ? "1 worker" : `${found.workers.length} workers`;
  isReady = !found.not_ready_because;
  state(found.not_ready_because ?? found.engine_error ?? `ready · ${workers} · ${found.version}`, isReady ? "good" : "bad");
}

async function read() {
  if (num % INFO_EVERY === 0) await info();
  if (!isReady) return; // asked again in a second
  const wants = [
    ask("metrics").then((reply) => reply.text()).then((text) => panes.metrics(new Samples(text))),
    json("cache/stats").then(panes.tiers),
    json("debug/rows").then(panes.rows),
    steps.read(),
  ];
  if (num % TREE_EVERY === 0) wants.push(json(`cache/tree?depth=${$("depth").value}`).then(tree.show));
  await Promise.all(wants);
  steps.show();
  num += 1;
  document.body.dataset.readings = num;
}

async function turn() {
  timer = null;
  if (!isWatched() || isReading) return;
  isReading = true;
  const begin = performance.now();
  try {
    await read();
    notice("");
    delay = PERIOD_MS;
  } catch (error) {
    num = 0; // the next reading reads all
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      key.set("");
      askForKey(error.message);
    } else {
      state("no answer", "bad");
      notice(error instanceof Refused ? error.message : "The server does not answer.");
      delay = Math.min(2 * delay, MOST_MS);
    }
  } finally {
    isReading = false;
  }
  plan(delay - (performance.now() - begin));
}

function plan(wait = 0) {
  if (timer !== null) clearTimeout(timer);
  timer = isWatched() ? setTimeout(turn, Math.max(wait, 0)) : null;
}

function askForKey(why = "") {
  $("key-form").hidden = false;
  const about = mode === "absent"
    ? "This server has no admin key: the engine is not shown. Start it with --admin-api-key. The playground takes any of its keys."
    : "The engine is shown with the admin key. It stays in this tab.";
  setText($("key-note"), why ? `${why} ${about}` : about);
  $("key").focus();
}

function choose() {
  const chosen = view();
  if (chosen === "playground") state(needsKey() ? "a key is needed" : "", "");
  for (const name of ["engine", "playground"]) {
    $(name).hidden = name !== chosen;
    $(`tab-${name}`).setAttribute("aria-selected", String(name === chosen));
    $(`tab-${name}`).tabIndex = name === chosen ? 0 : -1;
  }
  $("pause").hidden = chosen === "playground";
  resizeAll();
  plan();
}

function keys() {
  if (mode === "none") return;
  $("key-open").hidden = false;
  $("key-open").addEventListener("click", () => ($("key-form").hidden ? askForKey() : ($("key-form").hidden = true)));
  const use = (value) => {
    key.set(value);
    $("key").value = "";
    $("key-form").hidden = Boolean(value);
    num = 0;
    playground.models();
    plan();
  };
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use($("key").value.trim());
  });
  $("key-forget").addEventListener("click", () => use(""));
  if (needsKey()) {
    state("a key is needed", "bad");
    askForKey();
  }
}

function main() {
  panes.start();
  steps.start();
  tree.start();
  playground.start();
  const tabs = ["engine", "playground"].map((name) => $(`tab-${name}`));
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => (location.hash = tab.id.slice(4)));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      tabs[1 - i].focus();
      tabs[1 - i].click();
    });
  });
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    setText($("pause"), isPaused ? "Go on" : "Pause");
    plan();
  });
  $("depth").addEventListener("change", () => {
    num = 0;
    plan();
  });
  addEventListener("hashchange", choose);
  document.addEventListener("visibilitychange", () => plan());
  keys();
  choose();
}

main();
