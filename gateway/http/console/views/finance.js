// What all teams owe for a period, and what it cost the operator: the report of GET /admin/report, by team or by model.

import {
  PeriodBar, Figure, Problem, Table, count, html, path, percent, periodOf, usd, usdWith, useAct, useData, href,
} from "../ui.js";

const USUAL = "month";

export default function Finance({ api, query, go }) {
  const { from, to } = periodOf(query, USUAL);
  const by = query.by === "model" ? "model" : "team";
  const report = path("/admin/report", { from, to });
  const { data, error, again } = useData(api, report);
  const download = useAct((what, more) => api.download(path(`/admin/${what}`, { from, to, ...more }), `${what}-${from}-${to}.csv`));
  return html`
    <${PeriodBar} query=${query} go=${go} usual=${USUAL} />
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${download.error && html`<${Problem} error=${download.error} dismiss=${download.forget} />`}
    ${data && html`<${Report} data=${data} by=${by} go=${go} download=${download} />`}`;
}

function Report({ data, by, go, download }) {
  const { total } = data;
  const gpu = data.instances_total;
  const rows = (by === "team" ? data.teams : data.models).toSorted((a, b) => Number(b.cost_usd) - Number(a.cost_usd));
  const among = rows.map((row) => row.cost_usd);
  const nameOf = (row) => (by === "team" ? html`<a href=${href("calls", { team: row.team_id, from: data.from, to: data.to })}>${row.team_id}</a>` : row.model ?? "corrections that name none");
  const columns = [
    [by === "team" ? "Team" : "Model", nameOf, "name"],
    ["Requests", (row) => count(row.requests), "number wide"],
    ["Input tokens", (row) => count(row.input_tokens), "number wide"],
    ["Output tokens", (row) => count(row.output_tokens), "number wide"],
    ["A million tokens", (row) => (row.usd_per_million_tokens === null ? "–" : usdWith(row.usd_per_million_tokens, 2)), "number wide"],
    ["Share", (row) => percent(row.share_of_cost), "number"],
    ["Cost", (row) => usd(row.cost_usd, among), "number"],
  ];
  const foot = ["All", count(total.requests), count(total.input_tokens), count(total.output_tokens), "", "", usd(total.cost_usd, among)];
  return html`
    <div class="figures">
      <${Figure} label="Charged to teams" value=${usd(total.cost_usd)} exact=${`$${total.cost_usd}`}>${Number(total.corrections_usd) ? `${usd(total.corrections_usd)} of it corrections` : "no corrections"}<//>
      ${Number(gpu.cost_usd) > 0 && html`<${Figure} label="Our GPUs cost" value=${usd(gpu.cost_usd)} exact=${`$${gpu.cost_usd}`}>${usd(gpu.idle_usd)} of it idle<//>`}
      <${Figure} label="Saved by automatic routes" value=${data.auto ? usd(data.auto.saved_usd) : "–"}>${data.auto ? "against the large model" : "too many calls to be added up"}<//>
      <${Figure} label="State" value=${data.is_closed ? "Closed" : "Open"}>${data.is_closed ? "only corrections follow" : "calls may still arrive"}<//>
    </div>
    <section>
      <div class="bar"><div class="segments" role="group" aria-label="Lines by">
          ${["team", "model"].map((each) => html`<button key=${each} aria-pressed=${each === by} onClick=${() => go({ by: each })}>By ${each}</button>`)}
        </div><span class="end"><button onClick=${() => download.run("report", { format: "csv" })} disabled=${download.isBusy}>Download CSV</button>
          <button onClick=${() => download.run("focus")} disabled=${download.isBusy}>Download FOCUS</button></span></div>
      <${Table} label=${`Cost by ${by}`} columns=${columns} rows=${rows} keyOf=${(row) => row.team_id ?? row.model} foot=${foot} empty="Nothing was charged in this period." />
    </section>`;
}
