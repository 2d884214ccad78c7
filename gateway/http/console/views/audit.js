// The audit log: what admins did and what the safety checks found, newest first.

import { Problem, Table, href, html, path, useData, useState, when } from "../ui.js";

export default function Audit({ api, query, go }) {
  const list = path("/admin/audit-log", { team_id: api.team ?? query.team, action: query.action, before: query.before, limit: 100 });
  const { data, error, again } = useData(api, list);
  const columns = [
    ["Time, UTC", (entry) => when(entry.created_at)],
    ["Action, by", (entry) => html`<a href=${href("audit", { ...query, action: entry.action, before: null })}>${entry.action}</a>
      <br /><code class="soft">${entry.actor}${entry.address && html`<span class="wide"> from ${entry.address}</span>`}</code><div class="narrow"><${What} entry=${entry} /></div>`],
    ["Team", (entry) => entry.team_id && html`<a href=${href("audit", { ...query, team: entry.team_id, before: null })}>${entry.team_id}</a>`, "name"],
    ["What", (entry) => html`<${What} entry=${entry} />`, "long wide"],
  ];
  return html`
    <div class="chips">
      ${!api.team && html`<${Field} label="Team" value=${query.team} keep=${(team) => go({ team, before: null })} />`}
      <${Field} label="Action, such as key.revoked" value=${query.action} keep=${(action) => go({ action, before: null })} />
    </div>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data && html`<${Table} label="Audit log" columns=${columns} rows=${data.data} keyOf=${(entry) => entry.id} empty=${query.team || query.action ? "No entry fits." : "Nothing has been done yet."} />
      <div class="bar">
        ${query.before && html`<button onClick=${() => go({ before: null })}>Newest</button>`}
        ${data.has_more && html`<button onClick=${() => go({ before: String(data.data.at(-1).id) })}>Older</button>`}
      </div>`}`;
}

const SHORT = 120; // characters

// The subject, the reason and the details; long ones are opened by their reader.
function What({ entry }) {
  const details = entry.details ? wordsOf(entry.details) : "";
  const said = [entry.subject !== entry.team_id && entry.subject, entry.reason, details].filter(Boolean).join(" · ");
  if (said.length <= SHORT) return said;
  return html`<details><summary>${said.slice(0, SHORT)}…</summary>${said}</details>`;
}

// What is said in details, at any depth: "limits.requests_per_minute 600".
function wordsOf(details, at = "") {
  const said = Object.entries(details).filter(([, value]) => value !== null && value !== "");
  const each = ([name, value]) => (typeof value === "object" ? wordsOf(value, `${at}${name}.`) : `${at}${name} ${value}`);
  return said.map(each).filter(Boolean).join("; ");
}

function Field({ label, value, keep }) {
  const [said, setSaid] = useState(null);
  return html`<form onSubmit=${(event) => (event.preventDefault(), said !== null && (keep(said.trim() || null), setSaid(null)))}>
    <input size="40" aria-label=${label} placeholder=${`${label}, then Enter`} value=${said ?? value ?? ""} onInput=${(event) => setSaid(event.target.value)} />
  </form>`;
}
