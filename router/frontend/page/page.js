// Live page: polls /fleet, /fleet/series, /fleet/requests and /fleet/tenants, and draws the results.
// All data from the router is shown as text, never as HTML.
"use strict";

const POLL_MS = 1000;
const KEPT_SAMPLES = 600;
const HANDOFF_SHOWN = 3; // samples during which an edge moves after a hand-off
const SLOW_SHARE = 0.5; // of the median of its peers
const SVG = "http://www.w3.org/2000/svg";
const BLOCK_STATES = ["leased", "cached", "quarantined", "free"];

const byId = (id) => document.getElementById(id);
const state = { samples: [], applied: [], order: "newest", plots: [], chat: null, failures: 0, polls: 0 };

function element(name, { text, className, title } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  if (title) made.title = title;
  made.append(...children);
  return made;
}

function drawn(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const seconds = (value) =>
  value === null || value === undefined ? "–"
    : value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;

const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hourCycle: "h23" });

// --- calls -------------------------------------------------------------------------------------

// The key is stored until this tab is closed, and is sent only to the router of this page.
const headers = () => {
  const key = sessionStorage.getItem("baton-key");
  return key ? { authorization: `Bearer ${key}` } : {};
};

async function get(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(body.error?.message ?? `status ${answer.status}`), {
      status: answer.status,
    });
  }
  return answer.json();
}

async function poll() {
  try {
    const [requests, fleet, series] = await Promise.allSettled([
      get(`fleet/requests?limit=40&order=${state.order}`),
      get("fleet"),
      get(`fleet/series?after=${state.samples.at(-1)?.number ?? 0}`),
    ]);
    const refused = [requests, fleet, series].find((one) => one.status === "rejected")?.reason;
    showTenants();
    if (requests.status === "fulfilled") showRequests(requests.value.requests);
    if (fleet.status === "fulfilled" && series.status === "fulfilled") {
      takeSamples(series.value);
      showFleet(fleet.value, series.value.workers);
      showPlots();
      if (state.polls++ % PLANNER_POLLS === 0 && hasLimits()) showPlanner();
    }
    showTrouble(refused);
  } finally {
    setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
  }
}

function showTrouble(error) {
  state.failures = error && !error.status ? state.failures + 1 : 0;
  const needsKey = error?.status === 401;
  byId("key-form").hidden = !(needsKey || error?.status === 403);
  let text = "";
  if (needsKey) text = "An API key is required. An operator's key shows everything.";
  else if (error?.status === 403) text = "This is a tenant's API key: only its own requests are shown. The fleet needs an operator's key.";
  else if (error?.status) text = error.message;
  else if (state.failures > 1) text = "The router does not answer. The data below is outdated.";
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

function takeSamples(series) {
  // The numbers of a restarted router begin with 1 again.
  if (series.last < (state.samples.at(-1)?.number ?? 0)) state.samples = [];
  state.samples.push(...series.samples);
  state.samples.splice(0, Math.max(state.samples.length - KEPT_SAMPLES, 0));
}

// --- the fleet ---------------------------------------------------------------------------------

function median(values) {
  const sorted = values.filter(Boolean).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

function showFleet(fleet, rates) {
  const recent = state.samples.slice(-HANDOFF_SHOWN);
  const moving = {};
  for (const sample of recent) {
    for (const [edge, count] of Object.entries(sample.handoffs)) moving[edge] = (moving[edge] ?? 0) + count;
  }
  for (const role of ["prefill", "decode"]) {
    const workers = fleet.workers.filter((worker) => worker.role === role)
      .sort((a, b) => a.id.localeCompare(b.id, undefined, { numeric: true }));
    byId(role).replaceChildren(...workers.map((worker) => card(worker, rates, workers)));
  }
  byId("emulated").hidden = !fleet.emulated;
  byId("emulated").textContent = fleet.emulated
    ? `EMULATED: no model runs here. Responses are made up, and steps take the time of the timing model ${fleet.emulated}.`
    : "";
  byId("nobody").hidden = fleet.workers.length > 0;
  drawEdges(fleet.workers, moving);
  const ready = fleet.workers.filter((worker) => worker.state === "ready").length;
  const last = state.samples.at(-1);
  const moved = fleet.transfers;
  byId("summary").textContent =
    `${ready} of ${fleet.workers.length} workers ready · ${last?.running ?? 0} running, ${last?.queued ?? 0} queued · ` +
    `${moved.count} hand-offs, ${(moved.bytes / 2 ** 20).toFixed(1)} MiB, ${moved.failures} failed`;
}

function card(worker, rates, peers) {
  const rate = rates[worker.id] ?? {};
  const others = peers.filter((peer) => peer.id !== worker.id).map((peer) => rates[peer.id] ?? {});
  const prefill = rate.prefill_tokens_per_s, step = rate.decode_step_s;
  const notes = worker.refused ? [worker.refused] : [];
  const usual = median(others.map((other) => other.prefill_tokens_per_s));
  if (worker.role === "prefill" && prefill && prefill < SLOW_SHARE * usual) {
    notes.push(`slow: other workers compute ${usual.toFixed(0)} tokens/s`);
  }
  const usualStep = median(others.map((other) => other.decode_step_s));
  // The last step of an idle worker may have had a larger batch.
  if (worker.role === "decode" && worker.running && step && usualStep && step > usualStep / SLOW_SHARE) {
    notes.push(`slow: a step of other workers takes ${seconds(usualStep)}`);
  }
  const figures = [`${worker.running} running`, `${worker.waiting} waiting`];
  if (prefill) figures.push(`${prefill.toFixed(0)} prompt tokens/s`);
  if (step) figures.push(`${seconds(step)} per step`);
  const made = element("article", { className: `worker ${worker.state}${notes.length ? " slow" : ""}` },
    element("p", { className: "name" },
      element("b", { text: worker.id }),
      element("span", { text: worker.state, className: `state-${worker.state}` })),
    blocks(worker.kv_blocks),
    element("p", { className: "figures", text: figures.join(" · ") }));
  for (const note of notes) made.append(element("p", { className: "note", text: note }));
  made.dataset.worker = worker.id;
  return made;
}

function blocks(counts) {
  const text = BLOCK_STATES.map((name) => `${counts[name]} ${name}`).join(", ");
  const bar = drawn("svg", { class: "blocks", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `KV blocks: ${text}` });
  let x = 0;
  for (const name of BLOCK_STATES) {
    const width = counts.total ? (100 * counts[name]) / counts.total : name === "free" ? 100 : 0;
    bar.append(drawn("rect", { class: `fill-${name}`, x, y: 0, width, height: 10 }));
    x += width;
  }
  const title = drawn("title", {});
  title.textContent = text;
  bar.append(title);
  return bar;
}

function drawEdges(workers, moving) {
  const frame = byId("picture").getBoundingClientRect();
  const middle = (id, side) => {
    const box = document.querySelector(`[data-worker="${CSS.escape(id)}"]`).getBoundingClientRect();
    return [(side === "right" ? box.right : box.left) - frame.left, (box.top + box.bottom) / 2 - frame.top];
  };
  const alive = workers.filter((worker) => !["dead", "parked"].includes(worker.state));
  const lines = [];
  for (const from of alive.filter((worker) => worker.role === "prefill")) {
    for (const to of alive.filter((worker) => worker.role === "decode")) {
      const [x1, y1] = middle(from.id, "right"), [x2, y2] = middle(to.id, "left");
      const d = `M${x1},${y1} C${(x1 + x2) / 2},${y1} ${(x1 + x2) / 2},${y2} ${x2},${y2}`;
      lines.push(drawn("path", { d }));
      const count = moving[`${from.id}>${to.id}`] ?? 0;
      if (count) lines.push(drawn("path", { d, class: count > HANDOFF_SHOWN ? "moving busy" : "moving", "data-count": count }));
    }
  }
  byId("edges").replaceChildren(...lines);
}

// --- plots -------------------------------------------------------------------------------------

const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
const hasLimits = () => state.samples.some((sample) => sum(sample.limited));

function makePlots() {
  for (const plot of state.plots) plot.uplot.destroy();
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { show: false }, size: 46 };
  const clocks = (_, times) => times.map(clock);
  const line = (label, name) => ({ label, stroke: colour(name), width: 1.5, points: { show: true, size: 3 } });
  const make = (id, series, values, now, { height = 150, whole = false, hooks = {} } = {}) => {
    const options = {
      width: byId(id).clientWidth || 300, height, legend: { show: false }, cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
      axes: [{ ...axis, size: 26, space: 90, values: clocks }, whole ? { ...axis, space: 15, incrs: [1, 2, 5, 10, 20, 50, 100] } : axis], series: [{}, ...series], hooks,
    };
    return { uplot: new uPlot(options, [[], ...series.map(() => [])], byId(id)), id, height, values, now };
  };
  const ms = (name) => (sample) => (sample[name] === null ? null : sample[name] * 1000);
  const rate = (name) => (sample) => sample[name] / sample.took_s;
  const outcomes = (sample) => sum(sample.limited) / sample.took_s;
  const outcome = (name) => (sample) => (sample.limited[name] ?? 0) / sample.took_s;
  const steps = (label, name) => ({ ...line(label, name), points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
  const size = (role) => (sample) => sample.sizes?.[role] ?? 0;
  const latest = (name) => {
    const last = state.samples.findLast((sample) => sample[`${name}_p50_s`] !== null);
    return last ? `p50 ${seconds(last[`${name}_p50_s`])}, p99 ${seconds(last[`${name}_p99_s`])}` : "";
  };
  const lines = [line("p50", "--leased"), line("p99", "--moving")];
  state.plots = [
    make("ttft", lines, [ms("ttft_p50_s"), ms("ttft_p99_s")], () => latest("ttft")),
    make("itl", lines, [ms("itl_p50_s"), ms("itl_p99_s")], () => latest("itl")),
    make("rate", [line("output", "--leased"), line("prompt", "--moving")],
      [rate("generated_tokens"), rate("prompt_tokens")],
      () => `${rate("generated_tokens")(state.samples.at(-1)).toFixed(0)} output, ${rate("prompt_tokens")(state.samples.at(-1)).toFixed(0)} prompt`),
    make("goodput", [line("all", "--moving"), line("good", "--good"), line("refused", "--bad")], [outcomes, outcome("good"), outcome("refused")],
      () => {
        const limited = state.samples.slice(-60).filter((sample) => sum(sample.limited));
        const all = limited.reduce((total, sample) => total + sum(sample.limited), 0);
        const kept = limited.reduce((total, sample) => total + (sample.limited.good ?? 0), 0);
        return all ? `good: ${((100 * kept) / all).toFixed(0)} % of the last minute` : "";
      }, { hooks: { draw: [drawMarks] } }),
    make("sizes", [steps("prefill", "--leased"), steps("decode", "--moving")], [size("prefill"), size("decode")],
      () => `${splitText(state.samples.at(-1).sizes)} now`, { height: 90, whole: true }),
  ];
}

function showPlots() {
  if (!state.samples.length) return;
  const times = state.samples.map((sample) => sample.at_s);
  const figure = byId("goodput-figure");
  if (figure.hidden && hasLimits()) {
    figure.hidden = false;
    makePlots(); // its width is known now
  }
  for (const plot of state.plots) {
    plot.uplot.setData([times, ...plot.values.map((value) => state.samples.map(value))]);
    byId(`${plot.id}-now`).textContent = plot.now();
  }
}

// --- requests ----------------------------------------------------------------------------------

function routeOf(one) {
  if (!one.decode) return one.state === "queued" ? "waiting" : "–";
  return one.prefill === one.decode ? one.decode : `${one.prefill} → ${one.decode}`;
}

function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  const focused = document.activeElement?.dataset?.request;
  const rows = requests.map((one) => {
    const open = element("button", { text: one.id.slice(0, 22), title: one.id });
    open.dataset.request = one.id;
    open.addEventListener("click", () => openStory(one.id));
    return element("tr", {},
      element("td", {}, open),
      element("td", { text: one.state === "ended" ? seconds(one.elapsed_s) : `${one.state}, ${seconds(one.elapsed_s)}` }),
      element("td", { text: one.error ?? one.status ?? "", className: one.error ? "state-dead" : "" }),
      element("td", { text: seconds(one.first_token_s) }),
      element("td", { text: `${one.prompt_tokens} → ${one.completion_tokens}` }),
      element("td", { text: routeOf(one) }),
      element("td", { text: one.sentence, className: "why" }));
  });
  byId("requests").replaceChildren(...rows);
  // The list is redrawn each second: keep the keyboard focus.
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function setOrder(order) {
  state.order = order;
  for (const name of ["newest", "slowest"]) byId(name).setAttribute("aria-pressed", String(name === order));
  get(`fleet/requests?limit=40&order=${order}`).then((answer) => showRequests(answer.requests), showTrouble);
}

async function openStory(id) {
  let story;
  try {
    story = await get(`fleet/requests/${encodeURIComponent(id)}`);
  } catch (error) {
    return showTrouble(error);
  }
  story = story.parts?.[0] ?? story;
  byId("story-id").textContent = `${story.id} · ${story.state} · tenant ${story.tenant}`;
  byId("story-why").textContent = story.why.sentence;
  const route = story.route, better = story.better;
  byId("story-route").textContent = [
    route ? `${route.mode}: ${route.prefill} → ${route.decode}, ${route.cached_tokens} of ${story.prompt_tokens} prompt tokens cached` : "not placed",
    story.regret_s === null ? "" : `regret ${seconds(story.regret_s)}`,
    better ? `better: ${better.prefill ?? better.decode} → ${better.decode}` : "",
  ].filter(Boolean).join(" · ");
  byId("story-phases").replaceChildren(...Object.entries(story.phases_s).map(([name, took]) => {
    const bar = element("progress");
    [bar.max, bar.value, bar.ariaLabel] = [story.elapsed_s || 1, took, name];
    return element("div", { className: "phase" }, element("span", { text: name }), element("span", { text: seconds(took) }), bar);
  }));
  byId("story-gaps").textContent = story.longest_gaps.length
    ? `Longest pauses: ${story.longest_gaps.map((gap) => `${seconds(gap.gap_s)} before token ${gap.before_token}`).join("; ")}; typical: ${seconds(story.usual_gap_s)}.`
    : "";
  showCandidates(story);
  byId("story-timeline").replaceChildren(...story.timeline.map((event) =>
    element("li", { text: `${event.at_s.toFixed(3)} s  ${event.event}` })));
  if (!byId("story").open) byId("story").showModal();
}

function showCandidates(story) {
  if (!story.candidates.length) return byId("story-candidates").replaceChildren();
  const terms = Object.keys(story.candidates[0].terms);
  const cells = (kind, texts) => texts.map((text) => element(kind, { text }));
  const rows = story.candidates.slice(0, 12).map((one) => {
    const chosen = story.chosen && one.prefill === story.chosen.prefill && one.decode === story.chosen.decode;
    return element("tr", { className: chosen ? "chosen" : "" }, ...cells("td", [
      [one.prefill, one.decode].filter(Boolean).join(" → "), seconds(one.cost_s),
      ...terms.map((name) => seconds(one.terms[name])), one.uncached_tokens,
    ]));
  });
  const names = terms.map((name) => name.replace(/_s$/, ""));
  byId("story-candidates").replaceChildren(
    element("thead", {}, element("tr", {}, ...cells("th", ["placement", "cost", ...names, "to compute"]))),
    element("tbody", {}, ...rows));
}

// --- chat --------------------------------------------------------------------------------------

async function send(event) {
  event.preventDefault();
  state.chat?.abort();
  const chat = (state.chat = new AbortController());
  byId("answer").textContent = "";
  byId("told").textContent = "";
  byId("stop").hidden = false;
  try {
    const body = { model: await model(), stream: true, temperature: 0, max_tokens: Number(byId("tokens").value), messages: [{ role: "user", content: byId("prompt").value }] };
    const answer = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: chat.signal,
      headers: { ...headers(), "content-type": "application/json", "x-baton-mode": byId("mode").value },
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const id = answer.headers.get("x-request-id");
    await readEvents(answer.body, (text) => byId("answer").append(text));
    const why = element("button", { text: "Explain this request" });
    why.addEventListener("click", () => openStory(id));
    byId("told").replaceChildren(`${answer.headers.get("x-baton-route")} · `, why);
  } catch (error) {
    if (error.name !== "AbortError") byId("told").textContent = error.message;
  } finally {
    byId("stop").hidden = true;
  }
}

async function model() {
  state.model ??= (await get("v1/models")).data[0].id;
  return state.model;
}

async function readEvents(stream, show) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      show(event.choices[0]?.delta?.content ?? "");
    }
  }
}

// --- start -------------------------------------------------------------------------------------

byId("newest").addEventListener("click", () => setOrder("newest"));
byId("slowest").addEventListener("click", () => setOrder("slowest"));
byId("chat").addEventListener("submit", send);
byId("stop").addEventListener("click", () => state.chat?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat").requestSubmit();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("baton-key", byId("key").value.trim());
  byId("key").value = "";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makePlots(); showPlots(); });
addEventListener("resize", () => {
  for (const plot of state.plots) plot.uplot.setSize({ width: byId(plot.id).clientWidth, height: plot.height });
});
makePlots();
poll();
