// The deployment as an admin sees it: health, what today cost, teams, keys, models.

import { SUMS, card, count, day, el, figure, pill, table, usd } from "./dom.js";

const PAGE = 100; // teams
const KEY_MOODS = { active: "good", expired: "warn", revoked: "bad" };

export async function showAdmin(api, view, guarded) {
  const again = () => showAdmin(api, view, guarded);
  const [health, usage, keys, models] = await Promise.all([
    api.get("/health/ready"),
    api.get(usagePath()),
    api.get("/admin/keys?limit=1000"),
    api.get("/v1/models"),
  ]);
  view.replaceChildren(
    figures(health, usage),
    teamsCard(api, guarded, usage),
    dearestCard(usage.dearest),
    el("div", { class: "columns" }, newTeamCard(api, guarded, again), newKeyCard(api, guarded, usage.data, again)),
    keysCard(api, guarded, keys, again),
    modelsCard(models.data),
  );
  return again;
}

// One page of all teams with what they used today, and the sums of all of them.
function usagePath(after = null) {
  return `/admin/usage?limit=${PAGE}` + (after === null ? "" : `&after=${encodeURIComponent(after)}`);
}

function figures(health, usage) {
  const parts = Object.entries(health.parts).map(([name, state]) => `${name}: ${state}`);
  const state = pill(health.status, health.status === "ok" ? "good" : "warn");
  const { total } = usage;
  const late = total.corrections ? `, and ${usd(total.corrections.cost_usd)} of corrections` : "";
  return el(
    "div",
    { class: "grid" },
    figure("Health", state, parts.join(", ")),
    figure("Cost today", usd(total.cost_usd), `all teams, ${usage.to}, UTC${late}`),
    figure("Requests today", count(total.requests)),
    figure("Tokens today", count(total.input_tokens + total.output_tokens)),
  );
}

function teamsCard(api, guarded, first) {
  const columns = [
    ["Team", (team) => el("span", {}, team.name, " ", el("code", {}, team.id))],
    ["State", (team) => (team.suspended ? pill("suspended", "bad") : pill("active", "good"))],
    ...SUMS.map(([heading, cell, isNumber]) => [heading, (team) => cell(team.usage), isNumber]),
    ["Limit a day", (team) => (team.limits.usd_per_day === null ? "none" : usd(team.limits.usd_per_day)), true],
    ["Limit a month", (team) => (team.limits.usd_per_month === null ? "none" : usd(team.limits.usd_per_month)), true],
  ];
  const shown = el("div");
  const turnTo = (after) => guarded(async () => fill(await api.get(usagePath(after)), after));
  const fill = (page, after) => {
    const last = page.data.at(-1)?.id ?? null;
    const buttons = [
      after === null ? null : pageButton("First teams", () => turnTo(null)),
      page.has_more ? pageButton("Next teams", () => turnTo(last)) : null,
    ];
    shown.replaceChildren(table(`Usage on ${page.to}`, columns, page.data), el("div", { class: "pages" }, buttons));
  };
  fill(first, null);
  return card("Teams", shown);
}

function pageButton(words, turn) {
  return el("button", { type: "button", class: "quiet", onclick: turn }, words);
}

function dearestCard(lines) {
  const columns = [
    ["Team", (line) => (line.others ? `${count(line.others)} others` : el("code", {}, line.team_id))],
    ["Model", (line) => (line.model === null ? "" : el("code", {}, line.model))],
    ...SUMS,
  ];
  return card("Cost by team and model", table("Today, dearest first", columns, lines));
}

function newTeamCard(api, guarded, again) {
  const submit = (event) => {
    event.preventDefault();
    const said = new FormData(event.target);
    const limits = {};
    for (const name of ["usd_per_day", "usd_per_month"]) if (said.get(name)) limits[name] = said.get(name);
    const team = { id: said.get("id").trim(), name: said.get("name").trim() || null, limits };
    guarded(async () => {
      await api.call("POST", "/admin/teams", team);
      await again();
    });
  };
  const fields = el(
    "div",
    { class: "row" },
    field("Id", { name: "id", required: true, pattern: "[a-z0-9][a-z0-9_\\-]{0,63}", title: "lower-case letters, digits, - and _" }),
    field("Name", { name: "name" }),
    field("Dollars a day", { name: "usd_per_day", type: "number", min: "0", step: "any" }),
    field("Dollars a month", { name: "usd_per_month", type: "number", min: "0", step: "any" }),
    el("button", { type: "submit" }, "Create"),
  );
  return card("New team", el("form", { onsubmit: submit }, fields));
}

function newKeyCard(api, guarded, teams, again) {
  const shown = el("div", { role: "status" });
  const submit = (event) => {
    event.preventDefault();
    const said = new FormData(event.target);
    guarded(async () => {
      const made = await api.call("POST", "/admin/keys", { team_id: said.get("team_id").trim(), name: said.get("name").trim() });
      const done = el("button", { type: "button", onclick: () => guarded(again) }, "I have kept it");
      shown.replaceChildren(
        el("p", { class: "secret" }, "Shown this once: ", el("code", {}, made.key)),
        done,
      );
    });
  };
  // Those of the first page are offered; any other can be typed.
  const known = el("datalist", { id: "known-teams" }, teams.map((team) => el("option", { value: team.id }, team.name)));
  const fields = el(
    "div",
    { class: "row" },
    field("Team", { name: "team_id", required: true, list: "known-teams" }),
    field("Where it is used", { name: "name" }),
    el("button", { type: "submit" }, "Create"),
  );
  return card("New key", el("form", { onsubmit: submit }, fields, known), shown);
}

function keysCard(api, guarded, keys, again) {
  const revoke = (key) => {
    if (!confirm(`Revoke ${key.prefix}… of ${key.team_id}? It is refused within a second, for ever.`)) return;
    guarded(async () => {
      await api.call("DELETE", `/admin/keys/${encodeURIComponent(key.key_id)}`);
      await again();
    });
  };
  const button = (key) =>
    el("button", { type: "button", class: "quiet", "aria-label": `Revoke ${key.prefix}`, onclick: () => revoke(key) }, "Revoke");
  const columns = [
    ["Key", (key) => el("code", {}, `${key.prefix}…`)],
    ["Team", (key) => el("code", {}, key.team_id)],
    ["Name", (key) => key.name],
    ["State", (key) => pill(key.status, KEY_MOODS[key.status])],
    ["Made", (key) => day(key.created_at)],
    ["Expires", (key) => day(key.expires_at)],
    ["", (key) => (key.status === "active" ? button(key) : "")],
  ];
  const more = keys.has_more ? el("p", { class: "hint" }, "The first thousand keys.") : null;
  return card("Keys", table("By team", columns, keys.data), more);
}

function modelsCard(models) {
  const columns = [
    ["Name", (model) => el("code", {}, model.id)],
    ["Owner", (model) => model.owned_by],
    ["Means", (model) => (model.alias_of ? el("code", {}, model.alias_of) : "")],
    ["Context", (model) => (model.context ? count(model.context) : ""), true],
    ["Abilities", (model) => (model.abilities ?? []).join(", ")],
    ["Note", (model) => model.note ?? ""],
  ];
  return card("Models", table("What teams may ask for", columns, models));
}

function field(label, attributes) {
  return el("label", {}, label, el("input", { autocomplete: "off", ...attributes }));
}
