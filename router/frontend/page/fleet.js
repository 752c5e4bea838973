// The pools: a card for each worker of a small fleet, a cell for each worker of a large one.
"use strict";

const HANDOFF_SHOWN = 3; // samples during which an edge moves after a hand-off
const SHOWN_EDGES = 100;
const SLOW_SHARE = 0.5; // of the median of its peers
const CARDS = 4, TILES = 60; // most workers of a pool that are drawn so
const ROLES = ["prefill", "decode"];
const BLOCK_STATES = ["leased", "cached", "quarantined", "free"];
const STATE_SIGNS = { dead: "×", parked: "–", starting: "…", draining: "↓" };
const natural = new Intl.Collator("en", { numeric: true });
const pools = { shown: "", cells: new Map(), seen: new Map(), drawnSize: "" };

function showFleet(found) {
  state.fleet = found;
  state.workers = named(found.columns, found.workers);
  markSlow(state.workers);
  byId("emulated").hidden = !found.emulated;
  setText("emulated", found.emulated
    ? `EMULATED: no model runs here. Responses are made up, and steps take the time of the timing model ${found.emulated}.`
    : "");
  setText("fleet-name", found.fleet);
  document.title = `${found.fleet} · Baton`;
  byId("nobody").hidden = state.workers.length > 0;
  const most = Math.max(...ROLES.map((role) => state.workers.filter((one) => one.role === role).length));
  const size = most <= CARDS ? "cards" : most <= TILES ? "tiles" : "dots";
  byId("filters").hidden = size === "cards";
  const shown = [size, ...state.workers.map((one) => `${one.id} ${one.role}`)].join();
  if (shown !== pools.shown) buildPools(size, shown);
  if (size === "cards") showCards(); else showCells();
  showCounts();
  drawEdges(size);
}

function named(columns, rows) {
  const workers = rows.map((row) => {
    const worker = {};
    columns.forEach((name, place) => { worker[name] = row[place]; });
    return worker;
  });
  return workers.sort((a, b) => natural.compare(a.id, b.id));
}

function markSlow(workers) {
  const live = workers.filter((one) => one.state === "ready");
  const sorted = (values) => values.filter(Boolean).sort((a, b) => a - b);
  const rates = sorted(live.filter((one) => one.role === "prefill").map((one) => one.prefill_tokens_per_s));
  const steps = sorted(live.filter((one) => one.role === "decode").map((one) => one.decode_step_s));
  for (const worker of workers) {
    worker.notes = worker.note ? [worker.note] : [];
    worker.slow = false;
    const rate = worker.prefill_tokens_per_s, step = worker.decode_step_s;
    const usual = medianWithout(rates, rate), usualStep = medianWithout(steps, step);
    if (worker.role === "prefill" && rate && rate < SLOW_SHARE * usual) {
      worker.notes.push(`slow: other workers compute ${usual.toFixed(0)} tokens/s`);
      worker.slow = true;
    }
    // The last step of an idle worker may have had a larger batch.
    if (worker.role === "decode" && worker.running && step && usualStep && step > usualStep / SLOW_SHARE) {
      worker.notes.push(`slow: a step of other workers takes ${seconds(usualStep)}`);
      worker.slow = true;
    }
  }
}

// The median of a sorted list without one of its values.
function medianWithout(sorted, value) {
  const place = sorted.indexOf(value);
  if (place < 0) return sorted[sorted.length >> 1] ?? 0;
  const middle = (sorted.length - 1) >> 1;
  return sorted[place <= middle ? middle + 1 : middle] ?? 0;
}

// --- cards and cells ---------------------------------------------------------------------------

function buildPools(size, shown) {
  pools.shown = shown;
  pools.cells.clear();
  pools.seen.clear();
  for (const role of ROLES) {
    const pool = byId(role);
    pool.className = `pool ${size}`;
    pool.replaceChildren(...state.workers.filter((one) => one.role === role).map((worker, place) => {
      const made = element(size === "cards" ? "article" : "button");
      made.dataset.worker = worker.id;
      if (size !== "cards") made.tabIndex = place ? -1 : 0; // arrow keys lead to the others
      pools.cells.set(worker.id, made);
      return made;
    }));
  }
  if (size === "cards") byId("filter").value = "";
  filterCells();
}

function showCards() {
  for (const worker of state.workers) {
    const made = pools.cells.get(worker.id);
    const text = JSON.stringify(worker);
    if (pools.seen.get(worker.id) === text) continue;
    pools.seen.set(worker.id, text);
    const figures = [`${worker.running} running`, `${worker.waiting} waiting`];
    if (worker.prefill_tokens_per_s) figures.push(`${worker.prefill_tokens_per_s.toFixed(0)} prompt tokens/s`);
    if (worker.decode_step_s) figures.push(`${seconds(worker.decode_step_s)} per step`);
    const focused = made.contains(document.activeElement);
    const open = element("button", { text: worker.id, className: "plain" });
    made.className = `worker ${worker.state}${worker.notes.length ? " slow" : ""}`;
    made.replaceChildren(
      element("p", { className: "name" }, open,
        element("span", { text: worker.state, className: `state-${worker.state}` })),
      blocks(countsOf(worker)),
      element("p", { className: "figures", text: figures.join(" · ") }),
      ...worker.notes.map((note) => element("p", { className: "note", text: note })));
    if (focused) open.focus();
  }
}

// Five levels: idle, and four of the share of KV blocks that are leased.
const levelOf = (worker) =>
  worker.running + worker.waiting === 0 ? 0 : 1 + Math.min(3, Math.floor((4 * worker.kv_leased) / (worker.kv_total || 1)));

function showCells() {
  for (const worker of state.workers) {
    const look = `worker cell ${worker.state} load-${levelOf(worker)}${worker.waiting ? " waits" : ""}${worker.notes.length && worker.state === "ready" ? " slow" : ""}`;
    if (pools.seen.get(worker.id) === look) continue;
    const cell = pools.cells.get(worker.id);
    cell.className = look;
    pools.seen.set(worker.id, look);
    const sign = STATE_SIGNS[worker.state] ?? (worker.slow ? "!" : "");
    const number = worker.id.slice(worker.id.lastIndexOf("-") + 1);
    cell.textContent = byId(worker.role).classList.contains("dots") ? sign : number + sign;
    cell.setAttribute("aria-label", `${worker.id}, ${worker.state}${worker.slow ? ", slow" : ""}`);
  }
  if (byId("filter").value) filterCells();
}

function textOf(worker) {
  return [
    `${worker.id}: ${worker.state} since ${clock(worker.since_s)}`,
    `${worker.running} running, ${worker.waiting} waiting`,
    `${worker.kv_leased} of ${worker.kv_total} KV blocks leased`, ...worker.notes,
  ].join("\n");
}

const countsOf = (worker) => ({
  total: worker.kv_total, leased: worker.kv_leased, cached: worker.kv_cached, quarantined: worker.kv_quarantined,
  free: worker.kv_total - worker.kv_leased - worker.kv_cached - worker.kv_quarantined,
});

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

// --- counts, filter, keys ----------------------------------------------------------------------

function showCounts() {
  for (const role of ROLES) {
    const own = state.workers.filter((one) => one.role === role);
    const ready = own.filter((one) => one.state === "ready").length;
    const leased = total(own, (one) => one.kv_leased) / (total(own, (one) => one.kv_total) || 1);
    setText(`${role}-counts`, own.length
      ? `${role}: ${ready} of ${own.length} ready · ${total(own, (one) => one.running)} running, ${total(own, (one) => one.waiting)} waiting · ${Math.round(100 * leased)} % of KV`
      : "");
  }
}

const matches = (worker, words) => {
  const text = `${worker.id} ${worker.state} ${worker.waiting ? "waiting" : ""} ${worker.running ? "running" : "idle"} ${worker.notes.join(" ")}`.toLowerCase();
  return words.every((word) => text.includes(word));
};

function filterCells() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let left = 0;
  for (const worker of state.workers) {
    const kept = matches(worker, words);
    left += kept;
    const cell = pools.cells.get(worker.id);
    if (cell && cell.hidden === kept) cell.hidden = !kept;
  }
  setText("filtered", words.length ? `${left} of ${state.workers.length} workers` : "");
}

function filterBy(text) {
  byId("filter").value = text;
  filterCells();
  byId("fleet-head").scrollIntoView({ block: "start" });
}

function moveInPool(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const cell = event.target.closest("button.cell");
  if (!step || !cell) return;
  const cells = [...cell.parentElement.children].filter((one) => !one.hidden);
  const next = cells[cells.indexOf(cell) + step];
  if (!next) return;
  [cell.tabIndex, next.tabIndex] = [-1, 0];
  next.focus();
  event.preventDefault();
}

// --- edges -------------------------------------------------------------------------------------

// Only where KV moved lately. Lines are drawn between the pools, never over workers.
function drawEdges(size) {
  const moving = new Map();
  for (const sample of state.samples.slice(-HANDOFF_SHOWN)) {
    for (const [edge, count] of Object.entries(sample.handoffs)) moving.set(edge, (moving.get(edge) ?? 0) + count);
  }
  const frame = byId("picture").getBoundingClientRect();
  const left = byId("prefill").getBoundingClientRect().right - frame.left;
  const right = byId("decode").getBoundingClientRect().left - frame.left;
  const heights = new Map();
  const height = (id) => {
    if (!heights.has(id)) {
      const cell = pools.cells.get(id);
      const box = cell && !cell.hidden ? cell.getBoundingClientRect() : null;
      heights.set(id, box ? (box.top + box.bottom) / 2 - frame.top : null);
    }
    return heights.get(id);
  };
  const busiest = [...moving].sort((a, b) => b[1] - a[1]).slice(0, SHOWN_EDGES);
  const lines = [];
  for (const [edge, count] of busiest) {
    const [from, to] = edge.split(">");
    const y1 = height(from), y2 = height(to);
    if (y1 === null || y2 === null) continue;
    const middle = (left + right) / 2;
    const line = drawn("path", {
      d: `M${left},${y1} C${middle},${y1} ${middle},${y2} ${right},${y2}`,
      class: `moving${size === "cards" && count > HANDOFF_SHOWN ? " busy" : ""}`, "data-edge": edge,
    });
    const title = drawn("title", {});
    title.textContent = `${from} → ${to}: ${count} hand-offs in ${HANDOFF_SHOWN} s`;
    line.append(title);
    lines.push(line);
  }
  pools.drawnSize = size;
  byId("edges").classList.toggle("many", size !== "cards");
  byId("edges").replaceChildren(...lines);
}

function startFleet() {
  addEventListener("resize", () => { if (pools.drawnSize) drawEdges(pools.drawnSize); });
  const picture = byId("picture");
  const opened = (event) => {
    const edge = event.target.closest("[data-edge]")?.dataset.edge;
    if (edge) return openHash("edge", edge);
    const button = event.target.closest("button");
    const worker = button?.closest("[data-worker]")?.dataset.worker;
    if (worker) openHash("worker", worker);
  };
  picture.addEventListener("click", opened);
  picture.addEventListener("keydown", moveInPool);
  picture.addEventListener("pointerover", (event) => {
    const cell = event.target.closest("button.cell");
    const worker = cell && state.workers.find((one) => one.id === cell.dataset.worker);
    if (worker) cell.title = textOf(worker);
  });
  byId("filter").addEventListener("input", filterCells);
}
