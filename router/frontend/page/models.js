// Table of models: a row for each lane, with the gate of its canary or shadow. Only operators see it.
"use strict";

const CURVE_WIDTH = 120, CURVE_HEIGHT = 32;

async function showModels() {
  let found;
  try {
    found = await get("fleet/models");
  } catch {
    return; // the other calls of this poll show the reason
  }
  const names = Object.entries(found.routes);
  byId("models-section").hidden = found.models.length < 2 && !names.length;
  byId("models").replaceChildren(...found.models.map((model) => modelRow(model, names)));
}

function modelRow(model, names) {
  const is = (name) => name === model.name || model.names.includes(name);
  const tried = names.filter(([, entry]) => is(entry.canary) || (is(entry.shadow) && entry.shadow_share));
  const workers = Object.entries(model.workers).map(([kind, count]) => `${count} ${kind}`).join(", ");
  return element("tr", {},
    element("td", { text: model.name, className: "name" }),
    labelled("version", model.version),
    labelled("workers", workers || "–"),
    labelled("requests", `${model.running} running, ${model.waiting} waiting`),
    labelled("answers", names.map(([name, entry]) => shareText(name, entry, is)).filter(Boolean).join("; ") || "–"),
    gateCell(model, tried, names.filter(([, entry]) => is(entry.thrown_out) || (is(entry.shadow) && !entry.shadow_share))),
    curveCell(tried),
    buttonCell(tried));
}

function shareText(name, entry, is) {
  const percent = Math.round(entry.share * 1000) / 10;
  const tenants = entry.tenants.map((tenant) => `tenant ${tenant}`);
  const copied = Math.round(entry.shadow_share * 1000) / 10;
  if (is(entry.shadow) && copied) return `${name}: shadow ${copied} %`;
  if (is(entry.canary)) return `${name}: canary ${[...(percent ? [`${percent} %`] : []), ...tenants].join(", ")}`;
  if (is(entry.target)) return `${name}: ${entry.canary ? `${Math.round((100 - percent) * 10) / 10} %` : "all"}`;
  return "";
}

// Golden prompts, errors and compared answers of a canary or shadow, or why it was rolled back.
function gateCell(model, tried, thrownOut) {
  const cell = labelled("gate", "");
  const lines = thrownOut.map(([name, entry]) => ["bad", `✗ ${name}: rolled back: ${entry.reason}`]);
  for (const [, { gate }] of tried) {
    if (!gate) continue;
    const { canary, golden } = gate;
    if (golden) {
      const wrong = Object.keys(golden.wrong).length + Object.keys(golden.failed).length;
      lines.push(golden.passed ? ["good", `✓ ${golden.right} golden prompts`] : ["bad", `✗ ${wrong} golden prompts`]);
    }
    lines.push(["", `${canary.errors} of ${canary.requests} requests failed`]);
    const compared = canary.same + canary.different;
    if (compared) lines.push(["", `${canary.same} of ${compared} answers have the same tokens`]);
  }
  if (!lines.length) lines.push(["", model.golden ? `${model.golden} golden prompts` : "–"]);
  cell.append(...lines.map(([className, text]) => element("div", { className, text })));
  return cell;
}

// Two curves: the share of requests whose first token came within a time, for the tried model and stable.
function curveCell(tried) {
  const cell = labelled("first tokens", "");
  const gate = tried[0]?.[1].gate;
  const curves = gate ? [["moving", gate.canary.ttft], ["leased", gate.stable.ttft]] : [];
  const times = curves.flatMap(([, points]) => points.map(([took_s]) => Math.log(took_s)));
  if (!times.length) {
    cell.textContent = "–";
    return cell;
  }
  const low = Math.min(...times), high = Math.max(...times, low + 0.1);
  const picture = drawn("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, width: CURVE_WIDTH, height: CURVE_HEIGHT, role: "img" });
  const p95 = (tally) => seconds(tally.ttft_p95_s);
  picture.setAttribute("aria-label", `p95 of first tokens: canary ${p95(gate.canary)}, stable ${p95(gate.stable)}`);
  for (const [colour, points] of curves) {
    const place = ([took_s, share]) =>
      `${((Math.log(took_s) - low) / (high - low) * CURVE_WIDTH).toFixed(1)},${(CURVE_HEIGHT - share * (CURVE_HEIGHT - 1)).toFixed(1)}`;
    if (points.length) picture.append(drawn("polyline", { class: colour, points: [`0,${CURVE_HEIGHT}`, ...points.map(place)].join(" ") }));
  }
  cell.append(picture, element("div", { text: `p95 ${p95(gate.canary)}, stable ${p95(gate.stable)}` }));
  return cell;
}

function buttonCell(tried) {
  const cell = element("td");
  for (const [name] of tried) {
    const button = element("button", { text: `Roll back ${name}` });
    button.type = "button";
    button.addEventListener("click", () => rollBack(name));
    cell.append(button);
  }
  return cell;
}

async function rollBack(name) {
  if (!confirm(`Roll back ${name}? Its canary or shadow gets no more requests.`)) return;
  const answer = await fetch("fleet/models", {
    method: "POST", body: JSON.stringify({ verb: "rollback", name }),
    headers: { ...headers(), "content-type": "application/json" },
  });
  state.asksForKey = answer.status === 401;
  const body = answer.ok ? {} : await answer.json().catch(() => ({}));
  setText("models-problem", answer.ok ? "" : body.error?.message ?? `status ${answer.status}`);
  showModels();
}
