// Table of tenants with used ÷ limit. An operator sees all tenants, a tenant only itself.
"use strict";

const SHOWN_TENANTS = 50;
const TENANT_LIMITS = [
  ["rpm", "requests a minute"], ["tpm", "tokens a minute"], ["tpd", "tokens a day"],
  ["budget", "tokens a month"], ["concurrent", "requests at once"],
];
const NEARLY = 0.9;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

async function showTenants() {
  let found;
  try {
    found = await get(`fleet/tenants?limit=${SHOWN_TENANTS}`);
  } catch {
    return; // the other calls of this poll show the reason
  }
  byId("tenants-section").hidden = !found.tenants.length;
  const limitOf = (row, kind) => (kind === "budget" ? row.budget?.tokens : row[kind]) ?? null;
  const columns = TENANT_LIMITS.filter(([kind]) => found.tenants.some((row) => limitOf(row, kind) !== null));
  byId("tenants-columns").replaceChildren(
    ...["tenant", ...columns.map(([, text]) => text), "weight"].map((text) => element("th", { text })));
  byId("tenants").replaceChildren(...found.tenants.map((row) => element("tr", {},
    element("td", { text: row.tenant, className: "tenant" }),
    ...columns.map(([kind, text]) => limitCell(text, row.used[kind] ?? 0, limitOf(row, kind))),
    labelled("weight", String(row.weight ?? 1)))));
  byId("tenants-more").textContent = found.total > found.tenants.length
    ? `${found.tenants.length} of ${found.total} tenants. \`baton tenants ls\` lists all.` : "";
}

function labelled(label, text) {
  const cell = element("td", { text });
  cell.dataset.label = label;
  return cell;
}

function limitCell(label, used, limit) {
  if (limit === null) {
    const none = labelled(label, "–");
    none.className = "none";
    return none;
  }
  const cell = labelled(label, `${compact.format(used)} of ${compact.format(limit)}`);
  cell.title = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} ${label}`;
  const part = used / limit;
  cell.className = part >= 1 ? "spent" : part >= NEARLY ? "nearly" : "";
  const bar = element("progress");
  bar.max = 1;
  bar.value = Math.min(part, 1);
  bar.setAttribute("aria-label", `${label}: ${Math.round(part * 100)} %`);
  cell.append(bar);
  return cell;
}
