// The planner: its last decision as text, and its decisions as marks on the plot of goodput.
"use strict";

const PLANNER_POLLS = 5; // polls from one question to the planner to the next
const SAME_CHANGE_S = 5; // a decision, and the change that routers see because of it
const shownMarks = new Map(); // elements by text, so that a hovered one stays

async function showPlanner() {
  let text = "";
  try {
    const planner = await get("fleet/planner");
    const newest = planner.decisions[0];
    text = newest ? `Planner (${planner.mode}): ${decisionText(newest)}` : "";
    const applied = planner.decisions.filter((one) => one.done);
    state.applied = applied.map((one) => ({ at_s: one.at, text: decisionText(one) }));
  } catch { /* a fleet without a controller, or a tenant's key */ }
  byId("planner").textContent = text;
  byId("planner").hidden = !text;
}

function decisionText({ decision, done }) {
  const { type, reason, worker_id: worker, role, prefill, decode } = decision;
  let what = "";
  if (type === "turn") what = `${worker} ${done ? "became" : "would become"} a ${role} worker: `;
  if (type === "resize") what = `${done ? "now" : "would be"} ${prefill} + ${decode} workers: `;
  return what + reason;
}

const splitText = (sizes) => `${sizes?.prefill ?? 0} + ${sizes?.decode ?? 0}`;

// Applied decisions, and changes of roles without one, which operators order.
function marks() {
  const ordered = state.samples.filter((sample, place) =>
    place && sample.last_turn > state.samples[place - 1].last_turn &&
    !state.applied.some((one) => Math.abs(one.at_s - sample.at_s) < SAME_CHANGE_S));
  return [...state.applied,
    ...ordered.map((sample) => ({ at_s: sample.at_s, text: `roles changed to ${splitText(sample.sizes)}` }))];
}

function drawMarks(uplot) {
  const now = new Map();
  for (const mark of marks()) {
    const x = uplot.valToPos(mark.at_s, "x");
    if (x < 0 || x > uplot.over.clientWidth) continue;
    const text = `${clock(mark.at_s)} ${mark.text}`;
    const made = shownMarks.get(text) ?? element("span", { className: "mark", title: text });
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", text);
    made.style.left = `${x}px`;
    if (made.parentElement !== uplot.over) uplot.over.append(made);
    now.set(text, made);
  }
  for (const [text, made] of shownMarks) if (!now.has(text)) made.remove();
  shownMarks.clear();
  now.forEach((made, text) => shownMarks.set(text, made));
}
