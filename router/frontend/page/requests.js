// The list of requests, and the report of one.
"use strict";

const listed = { text: "", arrived: new Map() };

const getRequests = () =>
  get(`fleet/requests?limit=${byId("search").value.trim() ? SEARCHED : LISTED}&order=${state.order}`);

const SHOWN_STATES = { queued: "waiting", refused: "–" };

function routeOf(one) {
  if (!one.decode) return SHOWN_STATES[one.state] ?? "–";
  return one.prefill === one.decode ? one.decode : `${one.prefill} → ${one.decode}`;
}

const isFailed = (one) => Boolean(one.error) || one.status >= 400;

function found(requests) {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const textOfRequest = (one) =>
    `${one.id} ${one.tenant} ${one.state} ${one.status ?? ""} ${isFailed(one) ? "failed" : ""} ${one.error ?? ""} ${routeOf(one)} ${one.sentence}`.toLowerCase();
  return words.length ? requests.filter((one) => words.every((word) => textOfRequest(one).includes(word))).slice(0, LISTED) : requests;
}

function showRequests(requests) {
  const shown = found(requests);
  setText("no-requests", byId("search").value.trim() ? "No request matches." : "No requests yet. Send one below.");
  byId("no-requests").hidden = shown.length > 0;
  const text = JSON.stringify(shown, (name, value) => (name === "age_s" ? undefined : value));
  if (text === listed.text) return;
  listed.text = text;
  const focused = document.activeElement?.dataset?.request;
  byId("requests").replaceChildren(...requestRows(shown));
  // The list is redrawn when it changes: keep the keyboard focus.
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function requestRows(requests) {
  const arrived = new Map();
  const rows = requests.map((one) => {
    arrived.set(one.id, listed.arrived.get(one.id) ?? Date.now() / 1000 - one.age_s);
    const open = element("button", { text: one.id.slice(0, 22), title: one.id });
    open.dataset.request = one.id;
    open.addEventListener("click", () => openHash("request", one.id));
    const status = labelled("status", String(one.error ?? one.status ?? one.state));
    if (isFailed(one)) status.className = "state-dead";
    return element("tr", {},
      element("td", { className: "id" }, open),
      labelled("time", clock(arrived.get(one.id))),
      labelled("tenant", one.tenant || "–"),
      status,
      labelled("duration", seconds(one.elapsed_s)),
      labelled("first token", seconds(one.first_token_s)),
      labelled("tokens", `${one.prompt_tokens} → ${one.completion_tokens}`),
      labelled("route", routeOf(one)),
      element("td", { text: one.sentence, className: "why" }));
  });
  listed.arrived = arrived;
  return rows;
}

function refreshRequests() {
  getRequests().then((answer) => showRequests(answer.requests), showTrouble);
}

function setOrder(order) {
  state.order = order;
  for (const name of ["newest", "slowest"]) byId(name).setAttribute("aria-pressed", String(name === order));
  refreshRequests();
}

function setPaused(paused) {
  state.paused = paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) refreshRequests();
}

function listFailed() {
  byId("search").value = "failed";
  refreshRequests();
  byId("requests-head").scrollIntoView({ block: "start" });
}

async function openRequest(id) {
  let story;
  try {
    story = await get(`fleet/requests/${encodeURIComponent(id)}`);
  } catch (error) {
    return showTrouble(error);
  }
  story = story.parts?.[0] ?? story;
  byId("story-id").textContent = `${story.id} · ${story.state}${story.status ? ` · status ${story.status}` : ""} · tenant ${story.tenant}`;
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
  showDialog("story");
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

function startRequests() {
  byId("newest").addEventListener("click", () => setOrder("newest"));
  byId("slowest").addEventListener("click", () => setOrder("slowest"));
  byId("pause").addEventListener("click", () => setPaused(!state.paused));
  byId("search").addEventListener("input", refreshRequests);
}
