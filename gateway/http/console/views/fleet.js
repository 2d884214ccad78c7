// The replicas of our own engine, a card for each: queue, KV cache, hits, tokens a second, busy and idle in dollars. Above
// them the versions that are rolled out, with their share of conversations.

import { Empty, Facts, Meter, Problem, State, Table, clock, count, html, percent, usdWith, useData, when } from "../ui.js";

export default function Fleet({ api }) {
  const { data, error, again } = useData(api, "/admin/instances", { every: 5000 });
  if (!data) return error && html`<${Problem} error=${error} again=${again} />`;
  const alive = data.instances.filter((one) => !one.stale && one.seen_at !== null);
  const sum = (name) => alive.reduce((all, one) => all + one[name], 0);
  return html`
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data.instances.length === 0 && html`<${Empty}>No replica was seen in the last hour. A provider with “self_hosted: true” in tollgate.yaml is one.<//>`}
    ${data.instances.length > 0 && html`<p class="large">${count(Math.round(sum("tokens_per_second")))} tokens/s on ${alive.length} ${alive.length === 1 ? "replica" : "replicas"}, ${count(sum("queue_depth"))} waiting</p>`}
    ${data.rollouts.length > 0 && html`<section><h2>Rollouts</h2>
      <${Table} label="Rollouts" columns=${ROLLOUT} rows=${data.rollouts} keyOf=${(one) => one.pool} /></section>`}
    <div class="cards">${data.instances.map((one) => html`<${one.seen_at === null ? Announced : Replica} key=${one.instance_id} one=${one} />`)}</div>`;
}

const ROLLOUT = [
  ["Pool", (one) => one.pool, "name"],
  ["State", (one) => html`<${State} of=${one.state} />`],
  ["Conversations", (one) => html`${percent(one.share)}<span class="soft"> at the new version</span>`, "number"],
  ["New", (one) => html`<code>${one.revision}</code>`, "wide"],
  ["Before", (one) => html`<code>${one.kept}</code>`, "wide"],
  ["Since, UTC", (one) => when(one.since), "number wide"],
  ["Why", (one) => one.reason, "long wide"],
];

const announcement = (one) => [
  ...(one.revision === null ? [] : [["Revision", html`<code>${one.revision}</code>`]]),
  ...(one.share === null ? [] : [["Conversations", `${percent(one.share)} at its version`]]),
  ...(one.version === null ? [] : [["Version", one.version]]),
  ...(one.heartbeat_at === null ? [] : [["Heartbeat", clock(one.heartbeat_at)]]),
  ...(one.reason === null ? [] : [["Not asked", one.reason]]),
];

// One that announces itself and was not yet looked at: it starts, or it may not be asked.
function Announced({ one }) {
  return html`<section class="card">
    <div class="bar"><h3>${one.model_id}</h3><span class="end"><${State} of=${one.state} /></span></div>
    <${Facts} rows=${[["Address", html`<code>${one.base_url}</code>`], ...announcement(one), ["Replica", html`<code>${one.instance_id}</code>`]]} />
  </section>`;
}

// How far the counters of a tier's waiting tenants lie apart, against how far they can.
function Fairness({ tier, gap, bound }) {
  const words = `${count(Math.round(gap))} of at most ${count(Math.round(bound))} weighted tokens`;
  return html`<${Meter} label=${`Fairness gap, ${tier}`} used=${gap} limit=${bound} isGoal=${true} said=${words} />`;
}

function Replica({ one }) {
  const hours = (seconds) => (one.gpu_hour_usd === null ? null : (Number(one.gpu_hour_usd) * one.gpus * seconds) / 3600);
  const idle = Math.max(0, one.uptime_seconds - one.busy_seconds);
  return html`<section class="card">
    <div class="bar"><h3>${one.model_id}</h3><span class="end"><${State} of=${one.stale ? "stale" : one.state} /></span></div>
    <p><span class="large">${count(Math.round(one.tokens_per_second))}</span> tokens/s</p>
    <${Meter} label="KV blocks" used=${one.total_blocks - one.free_blocks} limit=${one.total_blocks} shown=${count} />
    ${one.roofline_share !== null && html`<${Meter} label="Share of the roofline, while busy" used=${one.roofline_share} limit=${1} isGoal=${true} />`}
    ${["interactive", "batch"].map((tier) => one.fairness?.[tier]?.bound > 0 && html`<${Fairness} key=${tier} tier=${tier} ...${one.fairness[tier]} />`)}
    <${Facts} rows=${[
      ["Waiting, running", `${count(one.queue_depth)}, ${count(one.running)}`],
      ["Requests/s", one.requests_per_second.toFixed(2)],
      ["Prefix hits", percent(one.prefix_hit_rate)],
      ["Busy since start", `${percent(one.uptime_seconds ? one.busy_seconds / one.uptime_seconds : 0)}${one.gpu_hour_usd === null ? "" : `, ${usdWith(hours(one.busy_seconds), 2)}`}`],
      ["Idle since start", one.gpu_hour_usd === null ? `${percent(one.uptime_seconds ? idle / one.uptime_seconds : 0)}` : usdWith(hours(idle), 2)],
      ["Node", `${one.gpu_node_id}, ${one.gpus} GPU${one.gpus === 1 ? "" : "s"}`],
      ...announcement(one),
      ["Replica", html`<code>${one.instance_id}</code>`],
    ]} />
  </section>`;
}
