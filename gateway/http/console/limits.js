// Limits of a team that are changed where they stand: its own, and those for one model, end user or tag.

import { Problem, Table, count, html, path, usd, useAct, useData, useState } from "./ui.js";

// Limits for one of many each: field of a team: [heading, what names one]
export const NAMED = {
  model_limits: ["For one model", "Model"],
  user_limits: ["For end users", "End user; * is each other one"],
  tag_limits: ["For tags", "KEY=VALUE of metadata; KEY=* is each other value"],
};
const NAMED_LIMITS = [["usd_per_day", "$ a day"], ["usd_per_month", "$ a month"], ["tokens_per_day", "Tokens a day"]];

// Limits in words: "$2.00 a day".
export function inWords(limits) {
  const said = NAMED_LIMITS.filter(([name]) => limits[name] !== null);
  return said.map(([name, words]) => (name.startsWith("usd") ? `${usd(limits[name])} ${words.slice(2)}` : `${count(limits[name])} ${words.toLowerCase()}`)).join(", ") || "no limit";
}

// What `Limit` needs for one of a team's own limits.
export function limitOf(api, team, name, again) {
  const save = (value) => patch(api, team, { limits: { [name]: value } }, again);
  return { api, label: `${name.replaceAll("_", " ")} of ${team.id}`, now: team.limits[name], name, save };
}

async function patch(api, team, changes, again) {
  await api.call("PATCH", `/admin/teams/${encodeURIComponent(team.id)}`, changes);
  again();
}

// A limit that is changed where it stands: Enter or leaving the field keeps it; an error stays beside it, with what was said.
export function Limit({ api, label, now = null, name, save }) {
  const [said, setSaid] = useState(null);
  const act = useAct(async () => {
    const text = said.trim();
    const isNumber = !name.startsWith("usd") && Number.isFinite(Number(text)); // JSON has null for what is not, which takes a limit away
    await save(text === "" ? null : isNumber ? Number(text) : text);
    setSaid(null);
  });
  const keep = (event) => {
    event?.preventDefault();
    if (said !== null && said.trim() !== String(now ?? "")) act.run();
  };
  if (!api.may()) return now ?? html`<span class="soft">none</span>`;
  return html`<form onSubmit=${keep}>
    <input class="short" inputmode="decimal" aria-label=${label} disabled=${act.isBusy} placeholder="none"
      value=${said ?? now ?? ""} onInput=${(event) => setSaid(event.target.value)} onBlur=${keep} />
    ${act.error && html`<p class="bad" role="alert">${act.error.message}</p>`}
  </form>`;
}

// A team's limits for one model, end user or tag each; a name that is typed has a row as soon as one of its limits is.
export function Named({ api, team, field, again }) {
  const [heading, what] = NAMED[field];
  const [typed, setTyped] = useState([]);
  const found = team[field];
  const names = [...new Set([...Object.keys(found), ...typed])];
  const save = (each, name) => (value) => patch(api, team, { [field]: { [each]: { [name]: value } } }, again);
  const act = useAct((each) => patch(api, team, { [field]: { [each]: null } }, again));
  const add = (event) => {
    event.preventDefault();
    const said = new FormData(event.target).get("name").trim();
    if (said) setTyped([...typed, said]);
    event.target.reset();
  };
  const columns = [
    ["Name", (each) => each, "name"],
    ...NAMED_LIMITS.map(([name, words]) => [words, (each) => html`<${Limit} api=${api} label=${`${words} of ${each}`} now=${found[each]?.[name]} name=${name} save=${save(each, name)} />`, name.startsWith("usd") ? "number" : "number wide"]),
    ...(api.may() ? [["Change", (each) => each in found && html`<button class="quiet danger" aria-label=${`Remove the limits of ${each}`} disabled=${act.isBusy} onClick=${() => act.run(each)}>Remove</button>`]] : []),
  ];
  if (!names.length && !api.may()) return null;
  return html`<section><h3>${heading}</h3>
    ${names.length > 0 && html`<${Table} label=${heading} columns=${columns} rows=${names} keyOf=${(each) => each} />`}
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
    ${api.may() && html`<form class="row" onSubmit=${add}><label>${what}<input name="name" autocomplete="off" maxlength="512" /></label><button>Add</button></form>`}
    ${field !== "model_limits" && names.length > 0 && html`<${UsedBy} api=${api} team=${team} of=${field === "user_limits" ? ["user"] : tagsOf(found)} />`}
  </section>`;
}

const tagsOf = (limits) => [...new Set(Object.keys(limits).map((name) => `metadata:${name.slice(0, name.indexOf("="))}`))];

// What each end user, or value of a tag, has used this month: asked for once its reader wants to know.
function UsedBy({ api, team, of }) {
  const [asked, setAsked] = useState(null);
  const list = path(`/admin/teams/${encodeURIComponent(team.id)}/value-budgets`, { of: asked, limit: 50 });
  const { data, error, again } = useData(api, asked && list);
  const spent = (name) => (one) => usd(one.budgets[name].used);
  const columns = [
    ["Name, or hash", (one) => one.name ?? html`<code>${one.id.slice(0, 12)}…</code>`, "name"],
    ["Today", spent("usd_today"), "number"],
    ["This month", spent("usd_this_month"), "number"],
    ["Left today", (one) => usd(one.budgets.usd_today.left), "number wide"],
    ["Left this month", (one) => usd(one.budgets.usd_this_month.left), "number wide"],
  ];
  return html`
    <div class="bar">${of.map((each) => html`<button key=${each} class="quiet" aria-expanded=${asked === each} onClick=${() => setAsked(asked === each ? null : each)}>Used by each ${each.replace("metadata:", "")}</button>`)}</div>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${asked && data && html`<${Table} label="Used by each" columns=${columns} rows=${data.data} keyOf=${(one) => one.id} empty="None has had a call this month." />
      ${data.has_more && html`<p class="soft">The first 50. “tollgate limits ${team.id} --of ${asked}” lists all.</p>`}`}`;
}
