// Live page: polls the router once a second and draws the results. This file has what the others share.
// All data from the router is shown as text, never as HTML.
"use strict";

const POLL_MS = 1000;
const KEPT_SAMPLES = 600;
const LARGE = 120; // workers above which a refresh draws half of the page
const LISTED = 40;
const SEARCHED = 500; // requests that a filter looks at
const MODEL_POLLS = 5; // between two requests of a fleet with one model
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const state = { samples: [], workers: [], applied: [], order: "newest", paused: false, plots: [], chat: null, asksForKey: false, failures: 0, polls: 0 };

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
const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
const total = (samples, count) => samples.reduce((all, sample) => all + (count(sample) ?? 0), 0);
const setText = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };

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
  // A large fleet is drawn in two halves, one a second: the workers, then the plots.
  const large = state.workers.length > LARGE, withWorkers = !large || state.polls % 2 === 0;
  try {
    const [requests, fleet, series] = await Promise.allSettled([
      getRequests(),
      withWorkers ? get("fleet/cells") : state.fleet,
      get(`fleet/series?workers=false&after=${state.samples.at(-1)?.number ?? 0}`),
    ]);
    const refused = [requests, fleet, series].find((one) => one.status === "rejected")?.reason;
    showTenants();
    if (requests.status === "fulfilled" && !state.paused) showRequests(requests.value.requests);
    const seen = fleet.status === "fulfilled" && series.status === "fulfilled";
    if (seen) {
      takeSamples(series.value);
      if (byId("seen").hidden) {
        byId("seen").hidden = false;
        makePlots(); // their widths are known now
      }
      if (withWorkers) showFleet(fleet.value);
      if (state.polls % MODEL_POLLS === 0 || !byId("models-section").hidden) showModels();
      if (!large || !withWorkers) showPlots();
      showHealth();
      if (state.polls++ % PLANNER_POLLS === 0 && hasLimits()) showPlanner();
    }
    showTrouble(refused);
  } finally {
    setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
  }
}

function showTrouble(error) {
  state.failures = error && !error.status ? state.failures + 1 : 0;
  const needsKey = state.asksForKey || error?.status === 401;
  byId("key-form").hidden = !(needsKey || error?.status === 403);
  let text = "";
  if (state.asksForKey) text = "Changes of the fleet need an operator's API key, or the fleet token: the file fleet.token in its state folder.";
  else if (needsKey) text = "An API key is required. An operator's key shows everything.";
  else if (error?.status === 403) text = "This is a tenant's API key: only its own requests are shown. The fleet needs an operator's key.";
  else if (error?.status) text = error.message;
  else if (state.failures > 1) text = "The router does not answer. The data below is outdated.";
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
  if (error) setText("summary", error.status ? "" : "no connection");
}

function takeSamples(series) {
  // The numbers of a restarted router begin with 1 again.
  if (series.last < (state.samples.at(-1)?.number ?? 0)) state.samples = [];
  state.samples.push(...series.samples);
  state.samples.splice(0, Math.max(state.samples.length - KEPT_SAMPLES, 0));
}
