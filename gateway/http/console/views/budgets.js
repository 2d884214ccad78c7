// Budgets: used, held and left in one bar. A team sees its own; an admin every team's month, with where it will end at
// today's rate, and changes limits in place: a team's own, and those for one model, end user or tag.

import { Limit, NAMED, Named, inWords, limitOf } from "../limits.js";
import {
  Drawer, Facts, Figure, Meter, PERIODS, Problem, Table, count, href, html, owed, path, percent, teamWords, usd, useData,
} from "../ui.js";

const BUDGETS = [
  ["usd_this_month", "Dollars this month", "usd_per_month", (value) => usd(value)],
  ["usd_today", "Dollars today", "usd_per_day", (value) => usd(value)],
  ["tokens_today", "Tokens today", "tokens_per_day", count],
];
const RATES = [
  ["requests_per_minute", "Requests a minute", "requests"],
  ["tokens_per_minute", "Tokens a minute", "tokens"],
  ["concurrent_requests", "Requests at once", null],
];
const LIMITS = { ...Object.fromEntries(RATES), tokens_per_day: "Tokens a day", usd_per_day: "Dollars a day", usd_per_month: "Dollars a month" };
const MINUTE = 60_000; // ms for which what is left of a minute is known
const PAGE = 200; // teams

export default function Budgets(props) {
  return props.role === "admin" ? html`<${OfTeams} ...${props} />` : html`<${OfOwn} ...${props} />`;
}

// What a month comes to over what it has come to so far.
function ahead() {
  const [from] = PERIODS.month[1]();
  const days = new Date(Date.UTC(Number(from.slice(0, 4)), Number(from.slice(5, 7)), 0)).getUTCDate();
  return days / ((Date.now() - Date.parse(from)) / 86_400_000);
}

function OfOwn({ api }) {
  const { data: team, error, again } = useData(api, "/v1/team", { every: 10_000 });
  if (error && !team) return html`<${Problem} error=${error} again=${again} />`;
  if (!team) return null;
  const used = Number(team.budgets?.usd_this_month?.used ?? NaN);
  const limit = team.limits.usd_per_month;
  const lies = team.unavailable && Number(team.unavailable.usd_this_month) > 0;
  return html`
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${!Number.isNaN(used) && html`<div class="figures">
      <${Figure} label="Dollars this month" value=${usd(used)}>${limit === null ? "no limit a month" : `of ${usd(limit)}`}<//>
      <${Figure} label="Month ends at" value=${html`<span class=${limit !== null && used * ahead() > limit ? "bad" : ""}>${usd(used * ahead(), [used])}</span>`}>${limit !== null && used * ahead() > limit ? "past its limit, at the rate so far" : "at the rate so far"}<//>
    </div>`}
    <div class="columns">
      <section><h2>${teamWords(team)}</h2><${Bars} scope=${team} left=${api.left} /></section>
      <section><h2>This key${team.key.name ? `, ${team.key.name}` : ""}</h2><${Bars} scope=${team.key} left=${{}} /></section>
    </div>
    ${["user_limits", "tag_limits"].map((field) => Object.keys(team[field]).length > 0 && html`<section><h2>${NAMED[field][0]}</h2>
      <${Facts} rows=${Object.entries(team[field]).map(([name, limits]) => [name, inWords(limits)])} /></section>`)}
    ${lies && html`<p class="warn">${usd(team.unavailable.usd_this_month)} of the month lie with gateways that do not answer.</p>`}
    <p class="soft">Held: what running calls may cost at the most, and what is not booked yet. Days and months are UTC.</p>`;
}

// The bars of a team or a key: its budgets, those of its limits for one model, and what the last answer said of its rates.
function Bars({ scope, left }) {
  const { limits, budgets } = scope;
  const bars = BUDGETS.map(([name, label, limit, shown]) => {
    const budget = budgets?.[name];
    if (limits[limit] === null) return budget && html`<p>${label}<span class="soft">, no limit: ${shown(budget.used)} used</span></p>`;
    if (!budget) return html`<p>${label}<span class="soft">: at most ${shown(limits[limit])}; what is used is not known at the moment</span></p>`;
    return html`<${Meter} label=${label} used=${Number(budget.used)} held=${Number(budget.held)} limit=${Number(limits[limit])} shown=${shown} />`;
  });
  const rates = RATES.filter(([limit]) => (limits[limit] ?? null) !== null).map(([limit, label, kind]) => {
    const last = kind && left[kind];
    const isKnown = last && Date.now() - last.at < MINUTE; // a minute later nothing is known
    return html`<p>${label}<span class="soft"> ${isKnown ? `${count(last.remaining)} of ${count(last.limit)} left` : `at most ${count(limits[limit])}`}</span></p>`;
  });
  const models = Object.entries(scope.model_limits ?? {}).map(([name, of]) => html`
    <h3>At ${name}</h3><${Bars} scope=${{ limits: of, budgets: scope.model_budgets?.[name] }} left=${{}} />`);
  return html`${bars}${rates}${models}`;
}

function OfTeams({ api, query, go }) {
  const [from, to] = PERIODS.month[1]();
  const list = path("/admin/usage", { from, to, after: query.after, limit: PAGE });
  const { data, error, again } = useData(api, list);
  const ends = (team) => owed(team.usage) * ahead();
  const among = data ? data.data.map((team) => owed(team.usage)) : [];
  const columns = [
    ["Team", (team) => html`<a href=${href("budgets", { ...query, team: team.id })}>${team.id}</a>`, "name"],
    ["Name", (team) => team.name, "name wide"],
    ["This month", (team) => usd(owed(team.usage), among), "number"],
    ["Fullest limit", (team) => html`<${Fullest} team=${team} />`],
    ["Ends at", (team) => html`<span class=${team.limits.usd_per_month !== null && ends(team) > team.limits.usd_per_month ? "bad" : ""}>${usd(ends(team), among)}</span>`, "number wide"],
    ["Limit a month, $", (team) => html`<${Limit} ...${limitOf(api, team, "usd_per_month", again)} />`, "number wide"],
    ["Limit a day, $", (team) => html`<${Limit} ...${limitOf(api, team, "usd_per_day", again)} />`, "number wide"],
  ];
  const near = data ? data.data.filter((team) => fullestOf(team)?.part >= 0.8) : [];
  const past = data ? data.data.filter((team) => team.limits.usd_per_month !== null && ends(team) > team.limits.usd_per_month) : [];
  return html`
    ${data && data.data.length > 0 && html`<div class="figures">
      <${Figure} label="This month, all teams" value=${usd(owed(data.total))}>ends at ${usd(owed(data.total) * ahead())}<//>
      <${Figure} label=${query.after || data.has_more ? "Of these teams, near or past a limit now" : "Near or past a limit now"} value=${count(near.length)}>${near.length ? near.slice(0, 3).map((team) => team.id).join(", ") : "no team"}<//>
      <${Figure} label=${query.after || data.has_more ? "Of these teams, past their limit at its end" : "Past their limit at its end"} value=${count(past.length)}>${past.length ? past.slice(0, 3).map((team) => team.id).join(", ") : "no team"}<//>
    </div>`}
    <p class="soft">Of ${from} to ${to}, UTC. “Ends at” is the month’s end at the rate so far. An empty limit is none.</p>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data && html`<${Table} label="Budgets of teams" columns=${columns} rows=${data.data} keyOf=${(team) => team.id}
        empty=${html`No teams yet. <a href=${href("teams")}>Create one</a>`} foot=${["All teams", "", usd(owed(data.total), among), "", "", "", ""]} />
      <div class="bar">
        ${query.after && html`<button onClick=${() => go({ after: null })}>First teams</button>`}
        ${data.has_more && html`<button onClick=${() => go({ after: data.data.at(-1).id })}>Next teams</button>`}
      </div>`}
    ${query.team && html`<${OneTeam} key=${query.team} api=${api} id=${query.team} close=${() => go({ team: null })} />`}`;
}

// The limit of a team's own of which most is used: { part, words }, or null where it has none.
function fullestOf({ limits, usage, usage_today: today }) {
  const tokens = [today, today.corrections ?? {}].reduce((sum, of) => sum + (of.input_tokens ?? 0) + (of.output_tokens ?? 0), 0);
  const all = [
    [owed(usage), limits.usd_per_month, "this month"],
    [owed(today), limits.usd_per_day, "today"],
    [tokens, limits.tokens_per_day, "of today’s tokens"],
  ];
  const found = all.filter(([, limit]) => limit !== null).map(([used, limit, words]) => ({ part: used / Math.max(limit, 1e-9), words }));
  return found.toSorted((a, b) => b.part - a.part)[0] ?? null;
}

function Fullest({ team }) {
  const fullest = fullestOf(team);
  if (fullest === null) return html`<span class="soft">no limit</span>`;
  const { part, words } = fullest;
  const state = part >= 1 ? "full" : part >= 0.8 ? "near" : "";
  return html`<div class="meter"><p class=${{ full: "bad", near: "warn" }[state] ?? "soft"}>${percent(part)} ${words}</p>
    <svg class=${`${state} wide`} viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">
      <rect class="whole" width="100" height="1" /><rect class="used" width=${Math.min(100, 100 * part)} height="1" /></svg></div>`;
}

function OneTeam({ api, id, close }) {
  const { data: team, error, again } = useData(api, `/admin/teams/${encodeURIComponent(id)}`);
  return html`<${Drawer} title=${team ? teamWords(team) : id} close=${close}>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${team && html`<section><${Bars} scope=${team} left=${{}} /></section>
      <section><h3>Limits</h3>${Object.keys(team.limits).map((name) => html`<div class="bar"><span>${LIMITS[name]}</span><span class="end"><${Limit} ...${limitOf(api, team, name, again)} /></span></div>`)}</section>
      ${Object.keys(NAMED).map((field) => html`<${Named} key=${field} api=${api} team=${team} field=${field} again=${again} />`)}
      <p><a href=${href("calls", { team: team.id })}>Its calls</a> · <a href=${href("overview", { team: team.id })}>Its overview</a> · <a href=${href("teams", { team: team.id })}>Its keys</a></p>`}
  <//>`;
}
