// Calls one by one, refused ones too: as they come or of a period, chosen by chips, and one of them whole in a drawer.

import {
  Copy, Drawer, Empty, Facts, PeriodBar, Problem, State, Table, clock, count, duration, href, html, path, periodOf,
  price, usdWith, useData, useEffect, useLive, useRef, useState, when, whole,
} from "../ui.js";

const LIVE = 2000; // ms between two looks, where calls are not streamed
const PAGE = 50;
const STATUSES = ["answered", "refused", "failed", "blocked", "interrupted"];
// What a call can be chosen by, beside its status: name of the query: words
const CHOICES = {
  team: "Team",
  model: "Model",
  key: "Key id",
  user: "User",
  metadata: "Metadata (KEY:VALUE)",
  route_reason: "Route reason",
  min_cost_usd: "Least cost in $",
  min_ms: "Least time in ms",
};

export default function Calls({ api, role, query, go }) {
  const isLive = !query.period && !query.from && !query.after;
  const [isPaused, setPaused] = useState(false);
  const { from, to } = isLive ? { from: null, to: null } : periodOf(query, "today");
  const chosen = Object.fromEntries(Object.keys(CHOICES).map((name) => [name === "team" ? "team_id" : name, query[name]]));
  if (role !== "admin") delete chosen.team_id;
  else if (api.team) chosen.team_id = api.team;
  const list = path(role === "admin" ? "/admin/calls" : "/v1/calls", {
    ...chosen, status: query.status, from, to, after: query.after, limit: PAGE,
  });
  const isMoving = isLive && !isPaused && !query.call;
  const canStream = isMoving && !api.team && !query.user && !query.metadata; // no event tells these, and a team's admin none
  const stream = path(role === "admin" ? "/admin/live" : "/v1/live", { types: "call,refusal", team_id: chosen.team_id });
  const [told, setTold] = useState({ list, events: [] }); // what the stream brought to this list
  const late = useRef(null); // a look for what was dropped: a flood does not end the look before
  const isStreamed = useLive(api, canStream ? stream : null, {
    opened: () => again(),
    tell: (events) => {
      setTold((last) => ({ list, events: keep([...events, ...(last.list === list ? last.events : [])], query) }));
      if (events.some((event) => event.type === "dropped")) late.current ??= setTimeout(() => ((late.current = null), again()), LIVE);
    },
  });
  const { data, error, at, again } = useData(api, list, { every: isMoving && !isStreamed ? LIVE : null });
  const now = data && isLive ? withTold(data.data, told.list === list ? told.events : [], query) : data?.data;
  const older = data && olderThan(data, now);
  const [held, setHeld] = useState(null); // what stands still while it is pointed at, or the focus is in it
  const shown = isLive && held ? held : now;
  const fresh = shown === now ? 0 : now.filter((call) => call.request_id > (shown[0]?.request_id ?? "")).length;
  const hold = () => isLive && setHeld((last) => last ?? now);
  const open = (call) => href("calls", { ...query, call: call.request_id });
  const columns = [
    ["Time, UTC", (call) => html`<a href=${open(call)}>${when(call.created_at)}</a>`],
    ["Status", (call) => html`<${State} of=${call.status} />${call.code && html` <span class="soft wide code" title=${call.code}>${call.code}</span>`}`],
    ...(role === "admin" ? [["Team", (call) => call.team_id, "name wide"]] : []),
    ["Model", modelOf, "name"],
    ["Input", (call) => count(call.input_tokens), "number wide"],
    ["Output", (call) => count(call.output_tokens), "number wide"],
    ["First token", (call) => duration(call.first_token_ms), "number wide"],
    ["In all", (call) => duration(call.total_ms), "number wide"],
    ["Cost", (call) => (call.status === "refused" ? "–" : usdWith(call.cost_usd, 6)), "number"],
  ];
  const isChosen = Object.keys(CHOICES).some((name) => query[name]) || query.status;
  const nothing = isChosen && data?.next
    ? "No call fits among those looked through; “Older” goes on."
    : isChosen
    ? html`No call fits. <a href=${href("calls", { period: query.period, from: query.from, to: query.to })}>Show all calls</a>`
    : html`No calls yet. The first one shows here within two seconds of its end. <a href=${href("playground")}>Make it in the playground</a>`;
  return html`
    <div class="bar">
      <div class="segments" role="group" aria-label="Which calls">
        <button aria-pressed=${isLive} onClick=${() => go({ period: null, from: null, to: null, after: null })}>Live</button>
        <button aria-pressed=${!isLive} onClick=${() => go({ period: "today", after: null })}>A period</button>
      </div>
      ${isLive
        ? html`<button aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>${isPaused ? "Go on" : "Pause"}</button>
            <span class="soft">${isPaused ? "Paused" : fresh ? `${fresh >= PAGE ? `${PAGE} or more` : fresh} new above` : isStreamed || query.call ? "As they end" : `Every ${LIVE / 1000} seconds${at ? `, seen ${clock(at)} UTC` : ""}`}</span>`
        : html`<${PeriodBar} query=${query} go=${go} />`}
    </div>
    <${Chips} isOfAll=${role === "admin" && !api.team} query=${query} go=${go} />
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data &&
    html`<div onMouseEnter=${hold} onMouseLeave=${() => setHeld(null)} onfocusin=${hold} onfocusout=${() => setHeld(null)}>
        <${Table} label="Calls" columns=${columns} rows=${shown} keyOf=${(call) => call.request_id} empty=${nothing} />
      </div>
      <div class="bar">
        ${query.after && html`<button onClick=${() => go({ after: null })}>Newest</button>`}
        ${older && html`<button onClick=${() => go({ after: older })}>Older</button>`}
      </div>`}
    ${query.call && html`<${Call} key=${query.call} api=${api} role=${role} id=${query.call} close=${() => go({ call: null })} />`}
  `;
}

const MOST_TOLD = 500; // events that are kept beside a page

// The newest events, or where these are many, those of the calls that a page can show.
export function keep(events, query) {
  if (events.length <= MOST_TOLD) return events;
  const shown = new Set(withTold([], events, query).map((call) => call.request_id));
  return events.filter((event) => shown.has(event.request_id));
}

// Where the next page goes on: below the last call that is shown, if newer ones have taken the place of some of the page's.
export function olderThan(page, shown) {
  const last = shown.length < PAGE ? "" : shown.at(-1).request_id;
  return last > (page.data.at(-1)?.request_id ?? "") ? last : page.next;
}

// The newest calls of a page and of what was told since, each once: a failed call is told twice, with its code as a refusal.
export function withTold(page, events, query) {
  const calls = new Map();
  for (const { type, ...event } of events.toReversed()) {
    if (type === "call") calls.set(event.request_id, { code: null, ...calls.get(event.request_id), ...event });
    else if (type === "refusal") calls.set(event.request_id, { status: "refused", cost_usd: 0, ...event, ...calls.get(event.request_id), code: event.code });
  }
  for (const call of page) calls.set(call.request_id, call);
  const wanted = [...calls.values()].filter((call) => fits(call, query));
  return wanted.toSorted((a, b) => (a.request_id < b.request_id ? 1 : -1)).slice(0, PAGE);
}

// Whether a call is one of those that are chosen, by what events tell of it.
function fits(call, query) {
  return (!query.status || call.status === query.status)
    && (!query.model || [call.model_used, call.model_asked].includes(query.model))
    && (!query.key || call.key_id === query.key)
    && (!query.route_reason || call.route_reason === query.route_reason)
    && (!query.min_ms || call.total_ms >= Number(query.min_ms))
    && (!query.min_cost_usd || Number(call.cost_usd) >= Number(query.min_cost_usd));
}

function modelOf(call) {
  if (!call.model_used || call.model_used === call.model_asked) return call.model_asked;
  return html`<span class="soft">${call.model_asked} →</span> ${call.model_used}`;
}

function Chips({ isOfAll, query, go }) {
  const offered = Object.keys(CHOICES).filter((name) => isOfAll || name !== "team");
  const [name, setName] = useState(offered[0]);
  const [value, setValue] = useState("");
  const choose = (changes) => go({ ...changes, after: null });
  const add = (event) => {
    event.preventDefault();
    if (!value.trim()) return;
    choose({ [name]: value.trim() });
    setValue("");
  };
  return html`<div class="chips" role="group" aria-label="Choose calls">
    ${STATUSES.map((each) => {
      const isOn = query.status === each;
      return html`<button key=${each} class="chip" aria-pressed=${isOn} onClick=${() => choose({ status: isOn ? null : each })}>${each}</button>`;
    })}
    ${offered
      .filter((each) => query[each])
      .map((each) => html`<button key=${each} class="chip chosen" title="Take away" onClick=${() => choose({ [each]: null })}>${CHOICES[each]}: ${query[each]} ×</button>`)}
    <form class="chips" onSubmit=${add}>
      <select aria-label="Choose by" value=${name} onChange=${(event) => setName(event.target.value)}>
        ${offered.map((each) => html`<option key=${each} value=${each}>${CHOICES[each]}</option>`)}
      </select>
      <input aria-label="Its value" value=${value} onInput=${(event) => setValue(event.target.value)} placeholder="then Enter" />
    </form>
  </div>`;
}

// Where a reader finds what would have been right, by the code of a refusal: [view, words].
const RIGHT = {
  model_not_found: ["models", "The models that there are"],
  model_not_allowed: ["models", "The models that this key may use"],
  tool_not_allowed: ["tools", "The tools that this key may call"],
  rate_limit_exceeded: ["budgets", "What is left of its limits"],
  token_limit_exceeded: ["budgets", "What is left of its limits"],
  insufficient_quota: ["budgets", "What is left of its limits"],
  context_length_exceeded: ["models", "How long a prompt each model takes"],
  unsupported_parameter: ["models", "What each model can"],
  max_cost_exceeded: ["models", "What each model costs"],
};

// One call whole: its waterfall, route, price line by line, what was held. A call shows within two seconds of its end, so
// one that is not there yet is asked for again.
function Call({ api, role, id, close }) {
  const one = (role === "admin" ? "/admin/calls/" : "/v1/calls/") + encodeURIComponent(id);
  const { data: call, error, again } = useData(api, one);
  useEffect(() => {
    const timer = error?.status === 404 ? setTimeout(again, 3000) : null;
    return () => clearTimeout(timer);
  }, [error]);
  return html`<${Drawer} title=${call ? `Call of ${whole(call.created_at)}` : "Call"} close=${close}>
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${call && html`<${OneCall} call=${call} role=${role} />`}
  <//>`;
}

function OneCall({ call, role }) {
  const isRefused = call.status === "refused";
  const last = call.attempts?.at(-1);
  const code = call.code ?? (call.status === "failed" ? last?.outcome : null);
  const why = [call.http_status && `HTTP ${call.http_status}`, call.limit && `limit ${call.limit}`, call.param && `at ${call.param}`];
  const [view, words] = RIGHT[code] ?? [];
  return html`
    <div>
      <p class="large">${code ? code.replaceAll("_", " ") : usdWith(call.cost_usd, 6)}</p>
      <p><${State} of=${call.status} /> ${why.filter(Boolean).join(" · ")}</p>
      ${call.message && html`<p>${call.message}</p>`}
      ${call.advice && html`<p>What to do: ${call.advice}.</p>`}
      ${view && html`<p><a href=${href(view, role === "admin" ? { team: call.team_id } : {})}>${words}</a></p>`}
    </div>
    ${!isRefused && html`<${Waterfall} call=${call} />`}
    ${call.left_out?.length > 0 && html`<section><h3>Left out of its route</h3><${Table} label="Left out" columns=${LEFT_OUT} rows=${call.left_out} keyOf=${(one) => one.model} /></section>`}
    <${Facts} rows=${[
      ["Request", html`<code>${call.request_id}</code> <${Copy} text=${call.request_id} />`],
      ["Model", modelOf(call)],
      ["Route", call.route_reason && call.route_reason + (call.complexity === null || call.complexity === undefined ? "" : `, small suffices: ${Number(call.complexity).toFixed(3)}`)],
      ["Answered by", call.provider && [call.provider, call.provider_endpoint].filter(Boolean).join(", ")],
      ["Account", last?.key === "team" ? "the team’s own at this provider" : null],
      ["Endpoint", call.endpoint],
      ["Team", role === "admin" ? html`<a href=${href("calls", { team: call.team_id })}>${call.team_id}</a>` : call.team_id],
      ["Key", call.key_id && html`<a href=${href("calls", { key: call.key_id })}>${call.key_id}</a>`],
      ["User", call.user_tag && html`<a href=${href("calls", { user: call.user_tag })}>${call.user_tag}</a>`],
      ["Metadata", call.metadata && Object.entries(call.metadata).map(([name, value]) => `${name}: ${value}`).join(", ")],
      ["Caller’s own id", call.client_request_id],
      ["Tier", call.tier],
      ["Safety", call.safety?.map((one) => `${one.action.replaceAll("_", " ")}: ${Object.keys(one.findings).join(", ")}`).join("; ")],
      ["Held before", call.held && `${usdWith(call.held.cost_usd, 6)} and ${count(call.held.tokens)} tokens, against ${usdWith(call.cost_usd, 6)} charged`],
    ]} />
    ${call.price?.lines?.length > 0 && html`<${PriceLines} call=${call} />`}
  `;
}

const LEFT_OUT = [["Model", (one) => one.model], ["Why", (one) => one.codes.map((code) => code.replaceAll("_", " ")).join("; "), "long"]];

function PriceLines({ call }) {
  const unit = (line) => (line.kind === "request" ? "a request" : "a million");
  const columns = [
    ["What", (line) => line.kind.replaceAll("_", " ")],
    ["Count", (line) => count(line.count), "number"],
    ["Price", (line) => html`${price(line.usd)} <span class="soft">${unit(line)}</span>`, "number"],
    ["Cost", (line) => usdWith(line.cost_usd, 9), "number"],
  ];
  const foot = ["Charged", "", "", usdWith(call.cost_usd, 9)];
  return html`<section><h3>Price</h3><${Table} label="Price by line" columns=${columns} rows=${call.price.lines} keyOf=${(line) => line.kind} foot=${foot} /></section>`;
}

// How an attempt ended that did not fail, in words.
const UNHARMED = {
  ...{ cached: "from the cache", hedge_lost: "the other was sooner", abandoned: "its client left" },
  team_limit: "left out, a limit of the team has no room",
};

// Bars on one time line: the queue, each attempt until its first token or its failure, and the answer to its end.
function Waterfall({ call }) {
  const times = call.times_ms ?? {};
  const rows = [];
  let at = 0;
  if (times.queue) rows.push(["Queue", at, times.queue, "wait"]);
  at += times.queue ?? 0;
  const attempts = call.attempts ?? [];
  const beside = attempts.some((one) => one.hedge) ? attempts.filter((one) => one.outcome !== "team_limit").slice(0, 2) : [];
  const longest = Math.max(...beside.map((one) => one.ms));
  for (const attempt of attempts) {
    const { outcome, ms = 0 } = attempt;
    const target = attempt.target.replace(/\/https?:.*\//, " "); // without its URL, which is told below
    const words = [target, attempt.hedge && "asked beside the first", outcome !== "ok" && (UNHARMED[outcome] ?? outcome)];
    const isOneOfTwo = beside.includes(attempt); // which end at once
    const kind = outcome === "ok" || outcome in UNHARMED ? "wait" : "failed";
    rows.push([words.filter(Boolean).join(": "), isOneOfTwo ? at + longest - ms : at, ms, kind]);
    if (attempt !== beside[0]) at += isOneOfTwo ? longest : ms;
  }
  const total = Math.max(times.total ?? 0, at, 1);
  if (times.total > at) rows.push(call.status === "failed" ? ["In the gateway", at, total - at, "wait"] : ["Answer", at, total - at, ""]);
  const unasked = call.status === "failed" && call.code !== "process_lost" && !call.attempts?.length && "No upstream was asked: the call ended in the gateway, and costs nothing.";
  if (!rows.length) return html`<${Empty}>${unasked || "No times are known of this call."}<//>`;
  return html`<section><h3>Waterfall</h3>${unasked && html`<p>${unasked}</p>`}<div class="waterfall">
    ${rows.map(
      ([words, from, took, kind]) => html`<span>${words}</span>
        <svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
          <rect class="ground" y="5.5" width="100" height="1" /><rect class="span ${kind}" x=${(100 * from) / total} width=${Math.max((100 * took) / total, 0.4)} height="12" />
        </svg><span class="number">${duration(took)}</span>`,
    )}
  </div>
  <p class="soft">${times.first_token ? `First token after ${duration(times.first_token)}, all` : "All"} after ${duration(times.total)}${times.prefill ? `; inside the engine ${duration(times.prefill)} of prefill and ${duration(times.decode)} of decode` : ""}.</p></section>`;
}
