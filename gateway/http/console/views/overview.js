// What was spent, by whom, and what needs attention: figures of a period beside those of the one before, a chart of them,
// and a line for each team, model or key.

import {
  Figure, PeriodBar, Problem, Table, count, duration, href, html, path, percent, periodOf, usd, usdTicks, useData, useEffect,
  useState,
} from "../ui.js";

const METRICS = ["cost_usd", "requests", "errors", "refused", "tokens", "first_token_ms"];
const EVERY = 10_000; // ms
const DAY = 86_400_000; // ms
// What the chart can show: metric: [words, value => text, ticks => texts where these differ]
const SHOWN = {
  cost_usd: ["Cost", (value) => usd(value), usdTicks],
  requests: ["Requests", count],
  errors: ["Errors", count],
  tokens: ["Tokens", compact],
  first_token_ms: ["First token, p95", duration],
};

function compact(value) {
  return Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

export default function Overview({ api, role, query, go }) {
  const { from, to, name } = periodOf(query);
  const days = (Date.parse(to) - Date.parse(from)) / DAY + 1;
  const team = api.team ?? query.team;
  const by = query.by ?? (role === "admin" && !team ? "team" : "model");
  const step = days <= (by === "team" ? 2 : 8) ? "hour" : "day"; // every hour of every team is a lot
  const source = role === "admin" ? "/admin/series" : "/v1/series";
  const ofAdmins = role === "admin" ? { team_id: team, health: api.team ? null : "true" } : {};
  const asked = { metric: METRICS.join(","), step, by, from, to, compare: "before", budgets: "true", ...ofAdmins };
  const now = useData(api, path(source, asked), { every: EVERY });
  const words = name === "today" ? "yesterday" : days === 1 ? "the day before" : `the ${days} days before`;
  const offered = role === "admin" ? [...(api.team ? [] : ["team"]), "model", "provider"] : ["model", "key"];
  return html`
    <div class="bar">
      <${PeriodBar} query=${query} go=${go} />
      ${role === "admin" && query.team && html`<button class="chip chosen" onClick=${() => go({ team: null })}>Team: ${query.team} ×</button>`}
    </div>
    ${now.error && html`<${Problem} error=${now.error} again=${now.again} />`}
    ${now.data && html`
      <${Figures} now=${now.data} before=${now.data.before} words=${words} />
      <${Attention} series=${now.data} query=${query} isAdmin=${role === "admin" && !api.team} />
      ${now.data.data.length > 0 && html`<${Charted} series=${now.data} by=${by} offered=${offered} query=${query} go=${go} />`}
      <${Lines} series=${now.data} by=${by} period=${{ period: query.period, from: query.from, to: query.to }} />`}`;
}

const totalOf = (series, metric) => series.total[metric].total;
const owedOf = (series) => Number(totalOf(series, "cost_usd")) + Number(series.corrections?.cost_usd ?? 0);
const rateOf = (errors, requests) => (errors + requests ? errors / (errors + requests) : null);

function Figures({ now, before, words }) {
  const change = (one, other) => {
    if (!Number(other)) return `none ${words}`;
    if (other < 0) return "–"; // a refund, of which nothing is a part
    const ratio = one / other;
    const part = Math.round(100 * (ratio - 1));
    return ratio > 10 ? `${ratio.toFixed(0)} times ${words}` : `${part > 0 ? "+" : part < 0 ? "−" : "±"}${Math.abs(part)} % on ${words}`;
  };
  const late = now.corrections && Number(now.corrections.cost_usd);
  const errors = (series) => rateOf(totalOf(series, "errors"), totalOf(series, "requests"));
  return html`<div class="figures">
    <${Figure} label=${late ? `Cost, ${usd(late)} of it corrections` : "Cost"} value=${usd(owedOf(now))} exact=${`$${owedOf(now)}`}>${change(owedOf(now), owedOf(before))}<//>
    <${Figure} label="Requests" value=${count(totalOf(now, "requests"))}>${change(totalOf(now, "requests"), totalOf(before, "requests"))}<//>
    <${Figure} label="Errors" value=${percent(errors(now))}>${percent(errors(before))} ${words}<//>
    <${Figure} label="First token, p95" value=${duration(totalOf(now, "first_token_ms"))}>${duration(totalOf(before, "first_token_ms"))} ${words}<//>
  </div>`;
}

// What is used of a limit, as its alert told: which, of whom, and where it stands.
function Reached({ budget, isAdmin }) {
  const { limit, threshold, team_id: team, key_id: key } = budget;
  const [amount, span] = [limit.startsWith("usd") ? usd(budget.cap) : `${count(budget.cap)} tokens`, limit.split("_per_")[1]];
  const whose = [isAdmin && team, key && `key ${key}`].filter(Boolean).join(", ");
  const words = threshold >= 100 ? `${amount} a ${span} are used up` : `${threshold} % of ${amount} a ${span} are used`;
  return html`${whose && `${whose}: `}<a href=${href("budgets", isAdmin ? { team } : {})}>${words}</a>`;
}

function Attention({ series, query, isAdmin }) {
  const health = series.health ? Object.entries(series.health.parts) : []; // not told of one team,
  const open = series.breakers ?? []; // nor these
  const ill = health.filter(([, state]) => state !== "ok");
  const [errors, requests, refused] = ["errors", "requests", "refused"].map((name) => totalOf(series, name));
  const calls = (status) => href("calls", { team: query.team, period: query.period ?? "today", from: query.from, to: query.to, status });
  const found = [
    ...ill.map(([part, state]) => html`${part}: ${state}`),
    ...open.map((one) => html`<a href=${href("models")}>${one.model} at ${one.provider}</a> is ${one.forced ? "not called: its breaker was opened by hand" : `not called: breaker ${one.state.replace("_", " ")}`}`),
    ...series.budgets.map((one) => html`<${Reached} budget=${one} isAdmin=${isAdmin} />`),
    ...(rateOf(errors, requests) > 0.02 ? [html`<a href=${calls("failed")}>${count(errors)} ${errors === 1 ? "call" : "calls"} failed</a>, ${percent(rateOf(errors, requests))} of all`] : []),
    ...(refused > 0 ? [html`<a href=${calls("refused")}>${count(refused)} ${refused === 1 ? "call was" : "calls were"} refused</a>`] : []),
  ];
  const parts = health.map(([part, state]) => `${part}: ${state}`).join(", ");
  return html`<section><h2>Needs attention</h2>
    ${found.length ? html`<ul class="attention">${found.map((one) => html`<li>${one}</li>`)}</ul>` : html`<p>Nothing.</p>`}
    ${parts && html`<p class="soft">${parts}</p>`}
  </section>`;
}

const nameOf = (line, by) => line[by] || (line.others ? `${line.others} others` : "none"); // refused before one was named

function Charted({ series, by, offered, query, go }) {
  const [Chart, setChart] = useState(null); // its code comes after the figures; its room is kept
  useEffect(() => {
    import("../chart.js").then((module) => setChart(() => module.Chart), () => {});
  }, []);
  const metric = query.metric in SHOWN ? query.metric : "cost_usd";
  const [words, plain, ticks] = SHOWN[metric];
  const most = Math.max(0, ...series.data.map((line) => Number(line.cost_usd.total)));
  const shown = metric === "cost_usd" ? (value) => usd(value, [most]) : plain; // with as many digits each
  const isStacked = metric !== "first_token_ms";
  const lines = isStacked
    ? series.data.map((line) => ({ name: nameOf(line, by), values: line[metric].values })).toSorted((a, b) => sumOf(b) - sumOf(a))
    : [{ name: "p95 of all", values: series.total[metric].values }];
  return html`<section>
    <div class="bar">
      <div class="segments" role="group" aria-label="Chart">${Object.entries(SHOWN).map(([each, [text]]) => html`<button key=${each} aria-pressed=${each === metric} onClick=${() => go({ metric: each }, { replace: true })}>${text}</button>`)}</div>
      <div class="segments" role="group" aria-label="Lines by">${offered.map((each) => html`<button key=${each} aria-pressed=${each === by} onClick=${() => go({ by: each }, { replace: true })}>By ${each}</button>`)}</div>
    </div>
    <div class="chart">${Chart && html`<${Chart} label=${`${words} by ${series.step}`} times=${series.times} lines=${lines} shown=${shown} ticks=${ticks} step=${series.step} isStacked=${isStacked} />`}</div>
  </section>`;
}

const sumOf = (line) => line.values.reduce((all, value) => all + Number(value ?? 0), 0);

function Lines({ series, by, period }) {
  const rows = series.data.toSorted((a, b) => Number(b.cost_usd.total) - Number(a.cost_usd.total));
  const among = rows.map((line) => line.cost_usd.total);
  const link = (line) => {
    const name = nameOf(line, by);
    if (by === "provider" || !line[by]) return name;
    if (by === "team") return html`<a href=${href("overview", { ...period, team: line.team })}>${name}</a>`; // on what, by model
    return html`<a href=${href("calls", { ...period, period: period.period ?? (period.from ? null : "today"), [by]: line[by] })}>${name}</a>`;
  };
  const isKnown = (metric) => rows.some((line) => line[metric].total !== null); // not line by line of all teams' long times
  const columns = [
    [by[0].toUpperCase() + by.slice(1), link, "name"],
    ["Requests", (line) => count(line.requests.total), "number"],
    ["Errors", (line) => percent(rateOf(line.errors.total, line.requests.total)), "number wide"],
    ...(isKnown("refused") ? [["Refused", (line) => count(line.refused.total), "number wide"]] : []),
    ["Tokens", (line) => count(line.tokens.total), "number wide"],
    ...(isKnown("first_token_ms") ? [["First token, p95", (line) => duration(line.first_token_ms.total), "number wide"]] : []),
    ["Cost", (line) => usd(line.cost_usd.total, among), "number"],
  ];
  return html`<${Table} label=${`By ${by}`} columns=${columns} rows=${rows} keyOf=${(line) => nameOf(line, by)} empty=${html`No calls in this period. <a href=${href("playground")}>Make one in the playground</a>`} />`;
}
