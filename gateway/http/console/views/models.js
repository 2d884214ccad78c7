// Models with their prices; for admins, the breaker of each at every endpoint with open and reset, and cooled-down keys.

import { Problem, State, Table, clock, count, html, price, useAct, useData } from "../ui.js";

export default function Models({ api, role }) {
  const { data, error, again } = useData(api, "/v1/models");
  const rate = (name) => (model) => price(model.price?.[name]);
  const models = data?.data ?? [];
  const columns = [
    ["Model", (model) => html`${model.id}${model.alias_of && html`<span class="soft"> = ${model.alias_of}</span>`}`, "name"],
    ["Provider", (model) => model.owned_by, "wide"],
    ["Context", (model) => (model.context ? count(model.context) : "–"), "number wide"],
    ["Input", rate("input"), "number"],
    ["Cached", rate("cached_input"), "number wide"],
    ["Output", rate("output"), "number"],
    ...(models.some((model) => model.price?.batch_discount) ? [["Batch", (model) => (model.price?.batch_discount ? `× ${model.price.batch_discount}` : "–"), "number wide"]] : []),
    ...(models.some(besidesOf) ? [["Besides", besidesOf, "wide"]] : []),
    ["Can", (model) => [(model.abilities ?? []).join(", "), model.note].filter(Boolean).join("; "), "long wide"],
  ];
  return html`
    ${role === "admin" && !api.team && html`<${Breakers} api=${api} />`}
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data && html`<section><h2>Prices, in dollars per million tokens</h2>
      <${Table} label="Models" columns=${columns} rows=${models} keyOf=${(model) => model.id} empty="No models." /></section>`}`;
}

// What else than tokens is priced: "request $0.01".
const OF_TOKENS = ["input", "cached_input", "output", "batch_discount"];
function besidesOf(model) {
  const said = Object.entries(model.price ?? {}).filter(([name, value]) => !OF_TOKENS.includes(name) && typeof value !== "object");
  return said.map(([name, value]) => `${name.replaceAll("_", " ")} ${price(value)}`).join(", ");
}

function Breakers({ api }) {
  const { data, error, again } = useData(api, "/admin/breakers", { every: 5000 });
  const act = useAct(async (breaker, what) => {
    if (what === "open" && !confirm(`Send ${breaker.model} at ${breaker.provider}, ${breaker.region} no calls until it is reset?`)) return;
    await api.call("POST", `/admin/breakers/${encodeURIComponent(breaker.id)}/${what}`);
    again();
  });
  if (!data) return error && html`<${Problem} error=${error} again=${again} />`;
  const rank = { open: 0, half_open: 1, closed: 2 };
  const rows = data.breakers.toSorted((a, b) => rank[a.state] - rank[b.state] || b.keys_set_aside.length - a.keys_set_aside.length);
  const columns = [
    ["Target", (one) => html`${one.model}<span class="soft"> at ${one.provider}, ${one.region}</span><div class="narrow">${whyOf(one)}</div>`, "name"],
    ["Breaker", (one) => html`<${State} of=${one.state} />`],
    ["Failed", (one) => `${count(one.failures)} of ${count(one.requests)}`, "number wide"],
    ["Why", (one) => whyOf(one), "long wide"],
    ...(api.may("operator") ? [["Change", (one) => html`<button class="quiet" disabled=${act.isBusy} aria-label=${`Reset ${one.model}`} onClick=${() => act.run(one, "reset")}>Reset</button>
      ${one.state === "closed" && html`<button class="quiet danger" disabled=${act.isBusy} aria-label=${`Open ${one.model}`} onClick=${() => act.run(one, "open")}>Open</button>`}`]] : []),
  ];
  const open = rows.filter((one) => one.state !== "closed").length;
  const cooled = rows.reduce((sum, one) => sum + one.keys_set_aside.length, 0);
  return html`<section>
    <p class="large">${open ? `${open} of ${rows.length} targets are not called` : `All ${rows.length} targets are called`}</p>
    <p class="soft">${cooled ? `${cooled} provider keys are cooled down. ` : ""}${data.shared ? "Breakers are shared by all gateways." : "Redis is away: these are the counts of this gateway alone."}</p>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
    <${Table} label="Breakers" columns=${columns} rows=${rows} keyOf=${(one) => one.id} empty="No targets." />
  </section>`;
}

function whyOf(one) {
  const said = [one.reason, one.retry_at && `tries again at ${clock(one.retry_at)} UTC`];
  const keys = one.keys_set_aside.map((key) => `a key is cooled down until ${clock(key.until)} UTC: ${key.reason}`);
  return [...said, ...keys].filter(Boolean).join("; ");
}
