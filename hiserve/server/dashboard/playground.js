// A chat over /v1/chat/completions: thoughts, tool calls, and how much of each prompt was cached.

import { json, key, mode, post } from "./api.js";
import { $, bar, count, h, setText } from "./dom.js";

const EXAMPLE = [{
  type: "function",
  function: {
    name: "find_train",
    description: "Finds trains.",
    parameters: { type: "object", properties: { departure: { type: "string" }, destination: { type: "string" } }, required: ["destination"] },
  },
}];

let turns = []; // messages, as the protocol has them
let model = "";
let aborter = null;

export async function models() {
  if (mode !== "none" && !key.get()) return;
  model = (await json("v1/models").catch(() => null))?.data?.[0]?.id ?? "";
  setText($("model"), model);
}

function block(role, ...content) {
  const node = h("article", { class: `turn ${role}` }, h("h3", {}, role), ...content);
  $("log").append(node);
  node.scrollIntoView({ block: "nearest" });
  return node;
}

// Yields the events of a stream.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

class Reply {
  constructor() {
    this.message = { role: "assistant", content: null };
    this.thought = h("div", { class: "text thought" });
    this.thoughts = h("details", { open: true, hidden: true }, h("summary", {}, "Thoughts"), this.thought);
    this.text = h("div", { class: "text" });
    this.calls = h("div");
    this.usage = h("div", { class: "usage", hidden: true });
    this.node = block("assistant", this.thoughts, this.text, this.calls, this.usage);
    this.begin = performance.now();
    this.first = null;
  }

  take(delta) {
    const { message } = this;
    if (this.first === null && (delta.content || delta.reasoning_content || delta.tool_calls)) this.first = performance.now();
    if (delta.reasoning_content) {
      message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
      this.thoughts.hidden = false;
      this.thought.append(delta.reasoning_content);
    }
    if (delta.content) {
      if (message.content === null) this.thoughts.open = false;
      message.content = (message.content ?? "") + delta.content;
      this.text.append(delta.content);
    }
    for (const part of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      let call = message.tool_calls[part.index];
      if (!call) {
        call = message.tool_calls[part.index] = { id: part.id, type: "function", function: { name: "", arguments: "" } };
        this.calls.append(h("div", { class: "call" }, h("strong"), " ", h("code")));
      }
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
      const [name, text] = this.calls.children[part.index].children;
      setText(name, call.function.name);
      setText(text, call.function.arguments);
    }
  }

  end(usage, finish, prompt) {
    const details = usage.prompt_tokens_details ?? {};
    const tiers = details.cached_tokens_details ?? {};
    const cached = details.cached_tokens ?? 0;
    const computed = usage.prompt_tokens - cached;
    const parts = ["device", "host", "store"].map((tier) => [tier, tiers[tier] ?? 0]);
    const from = parts.filter(([, tokens]) => tokens).map(([tier, tokens]) => `${count(tokens)} ${tier}`).join(", ");
    const miss = details.cache_miss;
    const seconds = (performance.now() - (this.first ?? this.begin)) / 1000;
    const words = [
      `prompt ${count(usage.prompt_tokens)}`,
      `cached ${count(cached)}${from ? ` (${from})` : ""}`,
      `computed ${count(computed)}`,
      `reply ${count(usage.completion_tokens)}`,
      `first token ${this.first === null ? "–" : `${(this.first - this.begin).toFixed(0)} ms`}`,
      `${(Math.max(usage.completion_tokens - 1, 0) / Math.max(seconds, 1e-3)).toFixed(0)} tokens/s`,
      finish,
    ];
    if (miss) words.push(`cache ends: ${miss.reason}${miss.part ? ` in ${miss.part}` : ""}`);
    const tokens = h("details", {}, h("summary", {}, "Prompt, its cached prefix marked"));
    tokens.addEventListener("toggle", () => this.showPrompt(tokens, prompt, cached), { once: true });
    this.usage.replaceChildren(h("span", { class: "words" }, words.join(" · ")), bar(parts, usage.prompt_tokens, `${cached} of ${usage.prompt_tokens} prompt tokens cached`), tokens);
    Object.assign(this.usage.dataset, { prompt: usage.prompt_tokens, cached });
    this.usage.hidden = false;
  }

  async showPrompt(place, prompt, cached) {
    const reply = await (await post("v1/tokenize", { ...prompt, add_generation_prompt: true, return_token_strs: true })).json();
    const strings = reply.token_strs;
    place.append(h("div", { class: "tokens", tabindex: 0 }, h("mark", {}, strings.slice(0, cached).join("")), strings.slice(cached).join("")));
  }

  fail(error) {
    this.node.append(h("p", { class: "error" }, error.name === "AbortError" ? "Stopped." : error.message));
  }
}

function tools() {
  const text = $("tools").value.trim();
  return text ? JSON.parse(text) : undefined;
}

function results(reply) {
  const calls = reply.message.tool_calls;
  const fields = calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: `Result of ${call.function.name}` }));
  const form = h("form", {}, ...fields, h("button", {}, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.remove();
    calls.forEach((call, i) => {
      turns.push({ role: "tool", tool_call_id: call.id, content: fields[i].value });
      block("tool", h("div", { class: "text" }, fields[i].value));
    });
    run();
  });
  reply.calls.append(form);
}

async function run() {
  if (!model) await models();
  const system = $("system").value.trim();
  const reply = new Reply();
  aborter = new AbortController();
  busy(true);
  try {
    const messages = system ? [{ role: "system", content: system }, ...turns] : [...turns];
    const prompt = { messages, tools: tools() };
    if (!$("thinks").checked) prompt.chat_template_kwargs = { enable_thinking: false };
    const body = {
      ...prompt, stream: true, stream_options: { include_usage: true },
      temperature: Number($("temperature").value), max_completion_tokens: Number($("max-tokens").value),
    };
    if (model) body.model = model;
    let usage = null;
    let finish = "";
    for await (const event of events(await post("v1/chat/completions", body, aborter.signal))) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) {
        reply.take(choice.delta);
        finish = choice.finish_reason ?? finish;
      }
    }
    if (usage) reply.end(usage, finish, prompt);
    turns.push(reply.message);
    if (finish === "tool_calls") results(reply);
  } catch (error) {
    reply.fail(error);
    if (reply.message.content) turns.push(reply.message);
  }
  busy(false);
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  if (!is) aborter = null;
}

export function start() {
  $("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("say").value.trim();
    if (!text || aborter) return;
    $("say").value = "";
    turns.push({ role: "user", content: text });
    block("user", h("div", { class: "text" }, text));
    run();
  });
  $("say").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("chat").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => aborter?.abort());
  $("clear").addEventListener("click", () => {
    aborter?.abort();
    turns = [];
    $("log").replaceChildren();
    $("say").focus();
  });
  $("example").addEventListener("click", () => ($("tools").value = JSON.stringify(EXAMPLE, null, 1)));
  models();
}
