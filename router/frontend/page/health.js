// The first line of the page: is it well, and if not, what is wrong and since when.
"use strict";

const LATELY_S = 60;
const QUEUED_S = 10; // a queue that never was empty for so long is a problem
const KEPT_SHARE = 0.9; // of the requests with latency limits, below which it is a problem
const FAILED_SHARE = 0.01; // of the requests that ended, above which failures are a problem
const NAMED = 3;

function showHealth() {
  const found = problems();
  const ready = state.workers.filter((one) => one.state === "ready").length;
  const down = ready === 0;
  const look = down ? "down" : found.some((one) => one.bad) ? "degraded" : "well";
  byId("health").className = look;
  setText("health", { down: "Down", degraded: "Degraded", well: "Well" }[look]);
  const last = state.samples.at(-1);
  const moved = state.fleet.transfers;
  setText("summary",
    `${ready} of ${state.workers.length} workers ready · ${last?.running ?? 0} running, ${last?.queued ?? 0} in the router's queue · ` +
    `${moved.count} hand-offs, ${(moved.bytes / 2 ** 20).toFixed(1)} MiB, ${moved.failures} failed`);
  const text = JSON.stringify(found);
  byId("problems").hidden = !found.length;
  if (byId("problems").dataset.text === text) return;
  byId("problems").dataset.text = text;
  byId("problems").replaceChildren(...found.map((one) => {
    const item = element("li", { className: one.bad ? "bad" : "note" });
    const more = one.filter !== undefined ? element("button", { className: "plain", text: one.text }) : element("span", { text: one.text });
    if (one.filter !== undefined) more.addEventListener("click", () => one.list ? listFailed() : openWorkers(one));
    item.append(more);
    if (one.since_s) item.append(element("span", { className: "since", text: ` since ${clock(one.since_s)}` }));
    return item;
  }));
}

const openWorkers = (problem) =>
  (problem.workers.length === 1 ? openHash("worker", problem.workers[0]) : filterBy(problem.filter));

function problems() {
  const found = [];
  for (const name of ["dead", "starting", "draining", "parked"]) {
    const own = state.workers.filter((one) => one.state === name);
    if (!own.length) continue;
    const reasons = [...new Set(own.flatMap((one) => one.notes))];
    found.push({
      text: `${listOf(own)} ${own.length > 1 ? "are" : "is"} ${name}${reasons.length === 1 ? ` (${reasons[0]})` : ""}`,
      since_s: Math.min(...own.map((one) => one.since_s)), bad: name === "dead", filter: name, workers: own.map((one) => one.id),
    });
  }
  const slow = state.workers.filter((one) => one.state === "ready" && one.notes.length);
  if (slow.length) {
    found.push({
      text: slow.length === 1 ? `${slow[0].id} is ${slow[0].notes[0]}` : `${listOf(slow)} are slow or refused`,
      bad: true, filter: "slow", workers: slow.map((one) => one.id),
    });
  }
  const versions = [...new Set(state.workers.map((one) => one.version).filter(Boolean))].sort();
  if (versions.length > 1) found.push({ text: `workers run different versions: ${versions.join(", ")}`, bad: false });
  for (const [name, what] of [["errors", "failed"], ["refused", "refused with 429"]]) {
    const lately = total(since(LATELY_S), (sample) => sample[name]);
    const many = name === "errors" && lately > FAILED_SHARE * total(since(LATELY_S), (sample) => sample.ended);
    if (lately) found.push({ text: `${lately} ${lately > 1 ? "requests" : "request"} ${what} in the last minute`, since_s: streak(name), bad: many, filter: "", list: true });
  }
  const kept = attainment();
  if (kept !== null && kept < KEPT_SHARE) found.push({ text: `${Math.round(100 * kept)} % of the last minute's requests were in time`, since_s: lateSince(), bad: true });
  const waited = queuedSince();
  if (waited) found.push({ text: `requests wait in the router's queue`, since_s: waited, bad: true });
  return found.sort((a, b) => Number(b.bad) - Number(a.bad));
}

const listOf = (workers) =>
  workers.slice(0, NAMED).map((one) => one.id).join(", ") + (workers.length > NAMED ? ` and ${workers.length - NAMED} more` : "");

function since(ago_s) {
  const last_s = state.samples.at(-1)?.at_s ?? 0;
  return state.samples.filter((sample) => sample.at_s > last_s - ago_s);
}

// The share of the last minute's requests with latency limits that were good; null without any.
function attainment() {
  const limited = since(LATELY_S).filter((sample) => sum(sample.limited));
  const all = total(limited, (sample) => sum(sample.limited));
  return all ? total(limited, (sample) => sample.limited.good) / all : null;
}

// When the share of good requests fell below the limit, and has stayed there.
function lateSince() {
  const limited = state.samples.filter((sample) => sum(sample.limited));
  const good = (sample) => sample.limited.good ?? 0;
  let since_s = 0, begin = 0, kept = 0, all = 0;
  for (const sample of limited) {
    kept += good(sample);
    all += sum(sample.limited);
    for (; limited[begin].at_s <= sample.at_s - LATELY_S; begin++) {
      kept -= good(limited[begin]);
      all -= sum(limited[begin].limited);
    }
    since_s = kept / all < KEPT_SHARE ? since_s || sample.at_s : 0;
  }
  return since_s;
}

// When the failures began that have come at least once a minute since.
function streak(name) {
  let first_s = 0;
  for (const sample of state.samples.toReversed()) {
    if (first_s && sample.at_s < first_s - LATELY_S) break;
    if (sample[name]) first_s = sample.at_s;
  }
  return first_s;
}

function queuedSince() {
  const begin = state.samples.findLastIndex((sample) => !sample.queued) + 1;
  const first = state.samples[begin], last = state.samples.at(-1);
  return first && last.at_s - first.at_s >= QUEUED_S ? first.at_s : 0;
}
