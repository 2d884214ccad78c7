// Teams, their keys, and the keys that they bring for providers: search, create, suspend, delete, rotate, revoke. A new key is shown once by the gateway; this tab keeps it
// until its reader says that it is copied.

import { Limit } from "../limits.js";
import { Copy, Drawer, Problem, State, Table, day, href, html, path, teamWords, useAct, useData, useEffect, useState, whole } from "../ui.js";

const PAGE = 50; // teams
const stateOf = (team) => (team.deleted_at ? "deleted" : team.suspended ? "suspended" : "active");
const MADE = "tollgate-new-keys"; // in the tab's session storage: keys that are not yet said to be copied

export default function Teams({ api, query, go }) {
  const list = path("/admin/teams", { search: query.search, after: query.after, limit: PAGE });
  const { data: found, error, again } = useData(api, api.team ? `/admin/teams/${encodeURIComponent(api.team)}` : list);
  const data = api.team && found ? { data: [found], has_more: false } : found;
  const [isNew, setNew] = useState(false);
  const columns = [
    ["Team", (team) => html`<a href=${href("teams", { ...query, team: team.id })}>${team.id}</a>`, "name"],
    ["Name", (team) => team.name, "name wide"],
    ["State", (team) => html`<${State} of=${stateOf(team)} />`],
    ["Models", (team) => (team.allowed_models === null ? "all" : team.allowed_models.length), "number wide"],
    ["Weight", (team) => team.weight, "number wide"],
    ["Made", (team) => day(team.created_at), "number"],
  ];
  return html`
    ${!api.team && html`<div class="bar">
      <${Search} said=${query.search ?? ""} search=${(words) => go({ search: words, after: null }, { replace: true })} />
      ${api.may() && html`<span class="end"><button class="main" onClick=${() => setNew(true)}>New team</button></span>`}
    </div>`}
    <${NewKeys} />
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data && html`<${Table} label="Teams" columns=${columns} rows=${data.data} keyOf=${(team) => team.id}
        empty=${query.search ? `No team’s id or name holds “${query.search}”.` : "No teams yet. Create the first one."} />
      <div class="bar">
        ${query.after && html`<button onClick=${() => go({ after: null })}>First teams</button>`}
        ${data.has_more && html`<button onClick=${() => go({ after: data.data.at(-1).id })}>Next teams</button>`}
      </div>`}
    ${isNew && html`<${NewTeam} api=${api} close=${() => setNew(false)} made=${(team) => (setNew(false), again(), go({ team: team.id }))} />`}
    ${query.team && html`<${OneTeam} key=${query.team} api=${api} id=${query.team} close=${() => go({ team: null })} changed=${again} />`}`;
}

function Search({ said, search }) {
  const [words, setWords] = useState(said);
  return html`<form role="search" aria-label="Teams" onSubmit=${(event) => (event.preventDefault(), search(words.trim()))}>
    <input type="search" aria-label="Search teams by id or name" placeholder="Id or name, then Enter" value=${words} onInput=${(event) => setWords(event.target.value)} />
  </form>`;
}

function NewTeam({ api, close, made }) {
  const act = useAct(async (form) => {
    const said = new FormData(form);
    const limits = {};
    for (const name of ["usd_per_day", "usd_per_month"]) if (said.get(name)) limits[name] = said.get(name);
    made(await api.call("POST", "/admin/teams", { id: said.get("id").trim(), name: said.get("name").trim() || null, limits }));
  });
  return html`<${Drawer} title="New team" close=${close}>
    <form class="row" onSubmit=${(event) => (event.preventDefault(), act.run(event.target))}>
      <label>Id<input name="id" required autocomplete="off" pattern="[a-z0-9][a-z0-9_\\-]{0,63}" title="lower-case letters, digits, - and _" /></label>
      <label>Name<input name="name" autocomplete="off" /></label>
      <label>Dollars a day<input name="usd_per_day" inputmode="decimal" autocomplete="off" placeholder="no limit" /></label>
      <label>Dollars a month<input name="usd_per_month" inputmode="decimal" autocomplete="off" placeholder="no limit" /></label>
      <button class="main" disabled=${act.isBusy}>Create</button>
    </form>
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
  <//>`;
}

function OneTeam({ api, id, close, changed }) {
  const team = useData(api, `/admin/teams/${encodeURIComponent(id)}`);
  const keys = useData(api, path("/admin/keys", { team_id: id, limit: 200 }));
  const act = useAct(async (change) => {
    await change();
    team.again();
    keys.again();
    changed();
  });
  const isGone = Boolean(team.data?.deleted_at);
  const suspend = () => {
    const { suspended } = team.data;
    if (!suspended && !confirm(`Suspend ${id}? All of its calls are refused at once, until it is resumed.`)) return;
    act.run(() => api.call("PATCH", `/admin/teams/${encodeURIComponent(id)}`, { suspended: !suspended }));
  };
  const erase = () => {
    const typed = prompt(`Delete ${id} for ever? Its keys die at once, its open batches are cancelled, what it keeps here is erased; its books stay. Type its id to confirm.`);
    if (typed !== null) act.run(async () => (await api.call("DELETE", path(`/admin/teams/${encodeURIComponent(id)}`, { confirm: typed.trim() })), close()));
  };
  const revoke = (key) => {
    const next = key.replaced_by ? ` The key in its place, ${key.replaced_by}, goes on.` : "";
    if (!confirm(`Revoke ${key.prefix}… of ${id}? It is refused within a second, for ever.${next}`)) return;
    act.run(() => api.call("DELETE", `/admin/keys/${encodeURIComponent(key.key_id)}`));
  };
  const rotate = (key) =>
    act.run(async () => keep(await api.call("POST", `/admin/keys/${encodeURIComponent(key.key_id)}/rotate`, {})));
  const create = (event) => {
    event.preventDefault();
    const form = event.target;
    act.run(async () => {
      keep(await api.call("POST", "/admin/keys", { team_id: id, name: new FormData(form).get("name").trim() }));
      form.reset();
    });
  };
  const columns = [
    ["Key", (key) => html`<code>${key.prefix}…</code>`],
    ["Name", (key) => key.name, "name wide"],
    ["State", (key) => html`<${State} of=${key.status} />`],
    ["Used", (key) => day(key.last_used_at), "number wide"],
    ["Expires", (key) => day(key.expires_at), "number wide"],
    ...(api.may("team-admin") ? [["Change", (key) => key.status === "active" && html`
      ${key.prefix !== "jwt" && html`<button class="quiet" aria-label=${`Rotate ${key.prefix}`} onClick=${() => rotate(key)}>Rotate</button>`}
      <button class="quiet danger" aria-label=${`Revoke ${key.prefix}`} onClick=${() => revoke(key)}>Revoke</button>`]] : []),
  ];
  return html`<${Drawer} title=${team.data ? teamWords(team.data) : id} close=${close}>
    ${(team.error ?? keys.error) && html`<${Problem} error=${team.error ?? keys.error} again=${() => (team.again(), keys.again())} />`}
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
    <${NewKeys} team=${id} />
    ${team.data && html`<div class="bar"><${State} of=${stateOf(team.data)} />
      <span class="soft">${isGone ? `at ${whole(team.data.deleted_at)}; its books stay` : `made ${whole(team.data.created_at)}`}</span>
      ${api.may() && !isGone && html`<span class="end"><button class=${team.data.suspended ? "" : "danger"} onClick=${suspend}>${team.data.suspended ? "Resume" : "Suspend"}</button><button class="danger" onClick=${erase}>Delete</button></span>`}</div>
      <p><a href=${href("calls", { team: id })}>Its calls</a> · <a href=${href("overview", { team: id })}>Its overview</a>${!api.team && html` · <a href=${href("budgets", { team: id })}>Its budgets</a>`}</p>`}
    ${keys.data && html`<section><h3>Keys</h3>
      <${Table} label="Keys" columns=${columns} rows=${keys.data.data} keyOf=${(key) => key.key_id} empty="No keys yet." />
      ${keys.data.has_more && html`<p class="soft">The first 200 keys. “tollgate keys list --team ${id}” lists all.</p>`}</section>
      ${api.may("team-admin") && !isGone && html`<form class="row" onSubmit=${create}><label>Where the new key is used<input name="name" autocomplete="off" /></label><button class="main" disabled=${act.isBusy}>New key</button></form>`}`}
    ${team.data && !isGone && html`<${Policy} api=${api} team=${team.data} again=${team.again} /><${OwnAccounts} api=${api} team=${team.data} change=${(changes) => act.run(() => api.call("PATCH", `/admin/teams/${encodeURIComponent(id)}`, changes))} />`}
  <//>`;
}

// What becomes of finds in what a team's calls ask and are answered, and how long both are kept.
const LEVELS = { "": "as the deployment has it", block: "blocked", flag: "flagged", off: "let through" };

function Policy({ api, team, again }) {
  const change = useAct(async (said) => (await api.call("PATCH", `/admin/teams/${encodeURIComponent(team.id)}`, said), again()));
  const level = (name, label) => html`<label>${label}<select value=${team.safety?.[name] ?? ""} disabled=${!api.may() || change.isBusy} onChange=${(event) => change.run({ safety: { [name]: event.target.value || null } })}>
    ${Object.entries(LEVELS).map(([value, said]) => html`<option key=${value} value=${value}>${said}</option>`)}</select></label>`;
  const keepFor = async (days) => (await api.call("PATCH", `/admin/teams/${encodeURIComponent(team.id)}`, { contents: days && { keep_days: days } }), again());
  return html`<details><summary>Safety and contents</summary><section>
    <div class="row">${level("input", "Finds in requests are")}${level("output", "Finds in answers are")}</div>
    ${change.error && html`<${Problem} error=${change.error} dismiss=${change.forget} />`}
    <div class="bar"><span>Days for which requests and answers are kept</span><span class="end"><${Limit} api=${api} label="Days for which contents are kept" now=${team.contents?.keep_days} name="keep_days" save=${keepFor} /></span></div>
  </section></details>`;
}

// ---- keys that a team brings for providers

// What a team's `company_keys` and `own_key_cost` may be: value: words
const COMPANY_KEYS = { otherwise: "where it has no key of its own", fallback: "also behind its own keys", never: "never" };
const OWN_KEY_COST = { none: "nothing: the provider sends it the bill", list: "the list price, in its budgets too" };

function OwnAccounts({ api, team, change }) {
  const [isOpen, setOpen] = useState(false);
  const choice = (label, name, words) => html`<label>${label}<select value=${team[name]} disabled=${!api.may()} onChange=${(event) => change({ [name]: event.target.value })}>
    ${Object.entries(words).map(([value, said]) => html`<option key=${value} value=${value}>${said}</option>`)}</select></label>`;
  return html`<details onToggle=${(event) => setOpen(event.target.open)}><summary>Own accounts at providers</summary>
    ${isOpen && html`<section>
      <div class="row">${choice("The deployment’s keys are used", "company_keys", COMPANY_KEYS)}${choice("A call with its own key costs", "own_key_cost", OWN_KEY_COST)}</div>
      <${ProviderKeys} api=${api} list=${`/admin/teams/${encodeURIComponent(team.id)}/provider-keys`} />
    </section>`}
  </details>`;
}

// A provider's key is sent once, never shown: it is known by its fingerprint.
function ProviderKeys({ api, list }) {
  const { data, error, again } = useData(api, list);
  const act = useAct(async (change) => {
    await change();
    again();
  });
  const one = (key) => `${list}/${encodeURIComponent(key.id)}`;
  const [replaced, setReplaced] = useState(null); // the key in whose place another is put
  const send = (event) => {
    event.preventDefault();
    const form = event.target;
    const said = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    act.run(async () => {
      await (replaced ? api.call("POST", `${one(replaced)}/rotate`, { key: said.key }) : api.call("POST", list, said));
      form.reset();
      setReplaced(null);
    });
  };
  const revoke = (key) => {
    if (confirm(`Erase the key ${key.fingerprint} for ${key.provider}?`)) act.run(() => api.call("DELETE", one(key)));
  };
  const columns = [
    ["Provider", (key) => key.provider],
    ["Fingerprint", (key) => html`<code>${key.fingerprint}</code>`],
    ["Name", (key) => key.name, "name wide"],
    ["Since", (key) => day(key.rotated_at ?? key.created_at), "number wide"],
    ...(api.may("team-admin") ? [["Change", (key) => html`
      <button class="quiet" aria-label=${`Replace ${key.fingerprint}`} onClick=${() => setReplaced(key)}>Replace</button>
      <button class="quiet danger" aria-label=${`Erase ${key.fingerprint}`} onClick=${() => revoke(key)}>Erase</button>`]] : []),
  ];
  return html`
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
    ${data && html`<${Table} label="Keys for providers" columns=${columns} rows=${data.data} keyOf=${(key) => key.id} empty="None: its calls go with the deployment’s keys." />`}
    ${api.may("team-admin") && html`<form class="row" onSubmit=${send}>
      ${replaced
        ? html`<p>In the place of ${replaced.fingerprint} for ${replaced.provider}:</p>`
        : html`<label>Provider<input name="provider" required autocomplete="off" /></label><label>Name<input name="name" autocomplete="off" /></label>`}
      <label>Its key<input name="key" type="password" required autocomplete="off" /></label>
      <button class="main" disabled=${act.isBusy}>${replaced ? "Replace" : "Bring a key"}</button>
      ${replaced && html`<button type="button" class="quiet" onClick=${() => setReplaced(null)}>Leave it</button>`}
    </form>`}`;
}

// ---- keys that were just made

const waiting = () => JSON.parse(sessionStorage.getItem(MADE) ?? "[]");
const keepAll = (keys) => {
  sessionStorage.setItem(MADE, JSON.stringify(keys));
  dispatchEvent(new Event(MADE));
};
const keep = (made) => keepAll([...waiting(), { key: made.key, key_id: made.key_id, team_id: made.team_id, name: made.name }]);

const snippet = (key) => `export TOLLGATE_KEY=${key}\ncurl ${location.origin}/v1/models -H "authorization: Bearer $TOLLGATE_KEY"`;

function NewKeys({ team = null }) {
  const [, turn] = useState(0);
  useEffect(() => {
    const hear = () => turn((last) => last + 1);
    addEventListener(MADE, hear);
    return () => removeEventListener(MADE, hear);
  }, []);
  const copied = (made) => keepAll(waiting().filter((each) => each.key_id !== made.key_id));
  return waiting()
    .filter((made) => team === null || made.team_id === team)
    .map((made) => html`<div class="secret" key=${made.key_id} role="status">
      <p>New key of ${made.team_id}${made.name ? `, ${made.name}` : ""}. It is shown this once; this tab keeps it until you have copied it.</p>
      <code>${made.key}</code>
      <pre>${snippet(made.key)}</pre>
      <div><${Copy} text=${made.key} words="Copy the key" /><button class="quiet" onClick=${() => copied(made)}>I have copied it</button></div>
    </div>`);
}
