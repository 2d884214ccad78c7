// MCP servers: the tools that may be called at each, what a call costs, who has them, and the calls that were made.

import { PERIODS, Problem, State, Table, clock, count, href, html, price, useData } from "../ui.js";

export default function Tools({ api, role, query }) {
  const { data, error, again } = useData(api, "/v1/mcp-servers", { every: 10_000 });
  if (!data) return error && html`<${Problem} error=${error} again=${again} />`;
  const servers = data.data;
  const away = servers.filter((one) => one.state !== "closed").length;
  const kept = { team: query.team, period: query.period };
  return html`
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${servers.length > 0
      ? html`<p class="large">${away ? `${away} of ${servers.length} servers are away` : `The tools of ${servers.length === 1 ? servers[0].id : `all ${count(servers.length)} servers`} can be called`}</p>`
      : html`<p class="empty">${role === "admin" ? html`No servers. A section <code>mcp</code> in tollgate.yaml brings them.` : "No MCP server is open to this key."}</p>`}
    ${servers.map((server) => html`<${Server} key=${server.id} server=${server} kept=${kept} />`)}`;
}

function Server({ server, kept }) {
  const [period] = PERIODS[kept.period] ?? PERIODS["7d"];
  const calls = (model) => href("calls", { ...kept, period: kept.period ?? "7d", model });
  const others = server.other_tools_usd === null ? [] : [{ name: "any other", model: `mcp/${server.id}/*`, price_usd: server.other_tools_usd }];
  const teamsOf = (tool) => {
    const named = Object.keys(server.teams).filter((team) => ["*", tool.name].some((each) => server.teams[team].includes(each)));
    return named.map((team) => (team !== "*" ? team : Object.keys(server.teams).length === 1 ? "all" : "all others")).join(", ");
  };
  const columns = [
    ["Tool", (tool) => tool.name, "name"],
    ...(server.teams ? [["Teams", teamsOf, "long wide"]] : []),
    ["A call", (tool) => price(tool.price_usd), "number"],
    ["Calls", (tool) => html`<a href=${calls(tool.model)} aria-label=${`${period} of ${tool.name} at ${server.id}`}>${period}</a>`, "number"],
  ];
  return html`<section>
    <div class="bar"><h2>${server.id}</h2><code>${location.origin}${server.path}</code>
      <span class="end"><span class="soft">Breaker</span> <${State} of=${server.state} />${server.retry_at && html`<span class="soft">tried again at ${clock(server.retry_at)} UTC</span>`}</span></div>
    <${Table} label=${`Tools of ${server.id}`} columns=${columns} rows=${[...server.tools, ...others]} keyOf=${(tool) => tool.name} empty="None of its tools may be called." />
  </section>`;
}
