// The house as an admin sees it: health, what today cost, teams, keys, models.

import { inParallel } from "./api.js";
import { SUMS, card, count, day, el, figure, pill, table, usd } from "./dom.js";

const MOST_TEAMS = 200;
const KEY_MOODS = { active: "good", expired: "warn", revoked: "bad" };

export async function showAdmin(api, view, guarded) {
  const again = () => showAdmin(api, view, guarded);
  const today = new Date().toISOString().slice(0, 10);
  const [health, teams, keys, models] = await Promise.all([
    api.get("/health/ready"),
    api.get(`/admin/teams?limit=${MOST_TEAMS}`),
    api.get("/admin/keys?limit=1000"),
    api.get("/v1/models"),
  ]);
  const usages = await inParallel(teams.data, 6, (team) =>
    api.get(`/v1/usage?team_id=${encodeURIComponent(team.id)}&date=${today}&group_by=model`),
  );
  const rows = teams.data.map((team, place) => ({ team, usage: usages[place] }));
  view.replaceChildren(
    figures(health, rows, today),
    teamsCard(rows, teams.has_more, today),
    modelsUsedCard(rows),
    el("div", { class: "columns" }, newTeamCard(api, guarded, again), newKeyCard(api, guarded, teams.data, again)),
    keysCard(api, guarded, keys, again),
    modelsCard(models.data),
  );
  return again;
}

function figures(health, rows, today) {
  const sum = (name) => rows.reduce((total, row) => total + row.usage.total[name], 0);
  const parts = Object.entries(health.parts).map(([name, state]) => `${name}: ${state}`);
  const state = pill(health.status, health.status === "ok" ? "good" : "warn");
  return el(
    "div",
    { class: "grid" },
    figure("Health", state, parts.join(", ")),
    figure("Cost today", usd(sum("cost_usd")), `${today}, UTC`),
    figure("Requests today", count(sum("requests"))),
    figure("Tokens today", count(sum("input_tokens") + sum("output_tokens"))),
  );
}

function teamsCard(rows, hasMore, today) {
  const columns = [
    ["Team", ({ team }) => el("span", {}, team.name, " ", el("code", {}, team.id))],
    ["State", ({ team }) => (team.suspended ? pill("suspended", "bad") : pill("active", "good"))],
    ...SUMS.map(([heading, cell, isNumber]) => [heading, ({ usage }) => cell(usage.total), isNumber]),
    ["Limit a day", ({ team }) => (team.limits.usd_per_day === null ? "none" : usd(team.limits.usd_per_day)), true],
    ["Limit a month", ({ team }) => (team.limits.usd_per_month === null ? "none" : usd(team.limits.usd_per_month)), true],
  ];
  const more = hasMore ? el("p", { class: "hint" }, `The first ${MOST_TEAMS} teams.`) : null;
  return card("Teams", table(`Usage on ${today}`, columns, rows), more);
}

function modelsUsedCard(rows) {
  const lines = rows.flatMap(({ team, usage }) => usage.results.map((line) => ({ ...line, team: team.id })));
  lines.sort((one, other) => other.cost_usd - one.cost_usd);
  const columns = [["Team", (line) => el("code", {}, line.team)], ["Model", (line) => el("code", {}, line.model)], ...SUMS];
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
      const made = await api.call("POST", "/admin/keys", { team_id: said.get("team_id"), name: said.get("name").trim() });
      const done = el("button", { type: "button", onclick: () => guarded(again) }, "I have kept it");
      shown.replaceChildren(
        el("p", { class: "secret" }, "Shown this once: ", el("code", {}, made.key)),
        done,
      );
    });
  };
  const options = teams.map((team) => el("option", { value: team.id }, `${team.name} (${team.id})`));
  const fields = el(
    "div",
    { class: "row" },
    el("label", {}, "Team", el("select", { name: "team_id", required: true }, options)),
    field("Where it is used", { name: "name" }),
    el("button", { type: "submit" }, "Create"),
  );
  return card("New key", el("form", { onsubmit: submit }, fields), shown);
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
