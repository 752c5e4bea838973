// What opens: the story of a request, of a worker, or of an edge. Each has a link, such as
// #worker=decode-3, so that it can be sent to somebody else.
"use strict";

const SHOWN_EDGES_OF_WORKER = 12;

function openHash(kind, id) {
  const hash = `#${kind}=${encodeURIComponent(id)}`;
  if (location.hash === hash) openStories(); else location.hash = hash;
}

function openStories() {
  const [, kind, raw] = location.hash.match(/^#(request|worker|edge)=(.+)$/) ?? [];
  if (!kind) return;
  const id = decodeURIComponent(raw);
  if (kind === "request") openRequest(id);
  else if (kind === "worker") openWorker(id);
  else openEdge(id);
}

function showDialog(name) {
  for (const other of ["story", "detail"]) if (other !== name && byId(other).open) byId(other).close("replaced");
  if (!byId(name).open) byId(name).showModal();
}

function closed(event) {
  if (event.target.returnValue === "replaced") event.target.returnValue = "";
  else history.replaceState(null, "", location.pathname + location.search);
}

function handoffs(kept) {
  const counts = new Map();
  for (const sample of state.samples) {
    for (const [edge, count] of Object.entries(sample.handoffs)) {
      if (kept(edge.split(">"))) counts.set(edge, (counts.get(edge) ?? 0) + count);
    }
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

async function openWorker(id) {
  let details, requests;
  try {
    [details, requests] = await Promise.all([
      get("fleet").then((fleet) => fleet.workers.find((one) => one.id === id)),
      get(`fleet/requests?limit=${SEARCHED}`),
    ]);
  } catch (error) {
    return showTrouble(error);
  }
  const worker = state.workers.find((one) => one.id === id);
  if (!details) return showDetail(id, ["This router does not know the worker."], [], [], []);
  const own = requests.requests.filter((one) => one.prefill === id || one.decode === id);
  const lines = [
    `${details.role} worker, ${details.state}${worker ? ` since ${clock(worker.since_s)}` : ""}${details.reason ? `: ${details.reason}` : ""}`,
    ...(worker?.notes ?? []).filter((note) => note !== details.reason),
    `${details.running} running, ${details.waiting} waiting`,
    `KV blocks: ${BLOCK_STATES.map((name) => `${details.kv_blocks[name]} ${name}`).join(", ")}`,
    worker?.prefill_tokens_per_s ? `${worker.prefill_tokens_per_s.toFixed(0)} prompt tokens/s` : "",
    worker?.decode_step_s ? `${seconds(worker.decode_step_s)} per decode step` : "",
    `life ${details.epoch} on ${details.host || "no host"}, ${details.ranks.length > 1 ? "pids" : "pid"} ${details.ranks.join(", ") || "–"}, ${details.address || "no address"}`,
    `engine: ${details.engine || "–"}${details.version ? `, version ${details.version}` : ""}`,
  ];
  const commands = [`baton logs ${id}`, `baton drain ${id}`, `baton restart ${id}`];
  showDetail(id, lines, commands, handoffs((pair) => pair.includes(id)), own);
}

async function openEdge(edge) {
  const [from, to] = edge.split(">");
  let rates, requests;
  try {
    [rates, requests] = await Promise.all([
      get("fleet/series?after=9999999999999").then((series) => series.workers),
      get(`fleet/requests?limit=${SEARCHED}`),
    ]);
  } catch (error) {
    return showTrouble(error);
  }
  const own = requests.requests.filter((one) => one.prefill === from && one.decode === to);
  const bytes_per_s = rates[to]?.edges_bytes_per_s[from];
  const count = handoffs((pair) => pair[0] === from && pair[1] === to)[0]?.[1] ?? 0;
  showDetail(`${from} → ${to}`, [
    `${count} hand-offs in the last ten minutes`,
    bytes_per_s ? `${(bytes_per_s / 2 ** 20).toFixed(0)} MiB/s, as ${to} measured it` : "no measured rate yet",
  ], [], handoffs((pair) => pair.includes(from) || pair.includes(to)).filter(([name]) => name !== edge), own);
}

function showDetail(name, lines, commands, edges, requests) {
  setText("detail-name", name);
  byId("detail-lines").replaceChildren(...lines.filter(Boolean).map((text) => element("p", { text })));
  byId("detail-commands").replaceChildren(...commands.map((text) => element("code", { text })));
  byId("detail-edges-head").hidden = !edges.length;
  byId("detail-edges").replaceChildren(...edges.slice(0, SHOWN_EDGES_OF_WORKER).map(([edge, count]) => {
    const open = element("button", { className: "plain", text: `${edge.replace(">", " → ")}: ${count}` });
    open.addEventListener("click", () => openHash("edge", edge));
    return element("li", {}, open);
  }));
  byId("detail-requests-head").hidden = !requests.length;
  byId("detail-requests").replaceChildren(...requests.slice(0, SHOWN_EDGES_OF_WORKER).map((one) => {
    const open = element("button", { className: "plain", text: one.id.slice(0, 22), title: one.id });
    open.addEventListener("click", () => openHash("request", one.id));
    return element("li", {}, open, ` ${seconds(one.elapsed_s)}: ${one.sentence}`);
  }));
  showDialog("detail");
}

function startStories() {
  addEventListener("hashchange", openStories);
  for (const name of ["story", "detail"]) byId(name).addEventListener("close", closed);
  openStories();
}
