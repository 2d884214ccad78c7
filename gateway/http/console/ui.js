// What the views share: how numbers, money and moments read, tables, bars, errors, the drawer, and data that is asked for
// once and again. Text only ever becomes text: nothing that a team, a model or a caller says can turn into markup.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/preact.js";

export { html, render, useCallback, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";

// ---- addresses and periods

export function href(view, query = {}) {
  const said = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `/console/${view}${said.length ? `?${new URLSearchParams(said)}` : ""}`;
}

// A path of the API with its query; what is null or empty is left out.
export function path(to, query) {
  const said = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return said.length ? `${to}?${new URLSearchParams(said)}` : to;
}

const DAY = 86_400_000; // ms
export const today = () => new Date().toISOString().slice(0, 10);
const daysAgo = (days) => new Date(Date.now() - days * DAY).toISOString().slice(0, 10);
export const PERIODS = {
  today: ["Today", () => [today(), today()]],
  yesterday: ["Yesterday", () => [daysAgo(1), daysAgo(1)]],
  "7d": ["7 days", () => [daysAgo(6), today()]],
  "30d": ["30 days", () => [daysAgo(29), today()]],
  month: ["This month", () => [`${today().slice(0, 8)}01`, today()]],
  "last-month": ["Last month", lastMonth],
};

function lastMonth() {
  const end = new Date(Date.parse(`${today().slice(0, 8)}01`) - DAY).toISOString().slice(0, 10);
  return [`${end.slice(0, 8)}01`, end];
}

// The UTC days that a query means, both included: { name, from, to }.
export function periodOf(query, usual = "today") {
  if (query.from && query.to) return { name: null, from: query.from, to: query.to };
  const name = query.period in PERIODS ? query.period : usual;
  const [from, to] = PERIODS[name][1]();
  return { name, from, to };
}

export function PeriodBar({ query, go, usual = "today" }) {
  const { name, from, to } = periodOf(query, usual);
  const choose = (each) => go({ period: each, from: null, to: null, after: null });
  const typed = (which) => (event) => event.target.value && go({ from, to, [which]: event.target.value, period: null });
  return html`<div class="bar" role="group" aria-label="Period, UTC days">
    <div class="segments">
      ${Object.entries(PERIODS).map(
        ([each, [words]]) => html`<button key=${each} aria-pressed=${each === name} onClick=${() => choose(each)}>${words}</button>`,
      )}
    </div>
    <span class="dates"><input type="date" aria-label="First day" value=${from} max=${to} onChange=${typed("from")} /> – ${" "}
    <input type="date" aria-label="Last day" value=${to} min=${from} onChange=${typed("to")} /> <span class="soft">UTC</span></span>
  </div>`;
}

// ---- how values read

export const count = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US"));

// Dollars with two digits, or with six where all that stands beside it (`among`) is below a dollar.
export function usd(value, among = [value]) {
  if (value === null || value === undefined) return "–";
  const most = Math.max(...among.map((each) => Math.abs(Number(each))));
  return usdWith(value, most > 0 && most < 1 ? 6 : 2);
}

export function usdWith(value, digits) {
  const amount = Number(value);
  const words = Math.abs(amount).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (amount < 0 ? "−$" : "$") + words;
}

// A price as it is, however many digits it has.
export function price(value) {
  if (value === null || value === undefined) return "–";
  return `$${Number(value).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 9 })}`;
}

// The dollars beside the ticks of an axis, with all digits of what lies between two of them: 0.025, not 0.03.
export function usdTicks(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  const isWhole = (digits) => Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) < 1e-6;
  const digits = [2, 3, 4, 5, 6, 7, 8].find((each) => isWhole(each) && step * 10 ** each > 0.5) ?? 9;
  return ticks.map((value) => usdWith(value, digits));
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 100_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60_000)} min`;
}

export const clock = (moment) => (moment ? new Date(moment).toISOString().slice(11, 19) : "–");
// A moment as lists tell it: the time alone where it is of today, else the day and the minute.
export function when(moment) {
  return moment.startsWith(today()) ? clock(moment) : moment.slice(5, 16).replace("T", " ");
}
export const day = (moment) => (moment ? moment.slice(0, 10) : "never");
export const whole = (moment) => (moment ? `${moment.slice(0, 10)} ${moment.slice(11, 19)} UTC` : "–");
export const percent = (part) => (part === null || part === undefined ? "–" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`);

// A team by its id, as it is typed and told everywhere; with its name where that is another.
export const teamWords = ({ id, name }) => (name && name !== id ? `${id}, ${name}` : id);

// What a team owes: its calls and what was booked beside them.
export const owed = (sums) => Number(sums.cost_usd) + Number(sums.corrections?.cost_usd ?? 0);

// ---- pieces of a page

const MOODS = {
  ...{ active: "good", completed: "good", closed: "good", ok: "good" },
  ...{ interrupted: "warn", expired: "warn", half_open: "warn", cancelling: "warn", draining: "warn", degraded: "warn", stale: "warn", stuck: "warn" },
  ...{ failed: "bad", refused: "bad", blocked: "bad", revoked: "bad", suspended: "bad", deleted: "bad", open: "bad", rolled_back: "bad" },
};

export const State = ({ of }) => html`<span class="state ${MOODS[of] ?? ""}">${String(of).replaceAll("_", " ")}</span>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// What went wrong, beside what it went wrong with. `again` tries once more; `dismiss` takes it away.
export function Problem({ error, again, dismiss }) {
  return html`<div class="problem" role="alert">
    <p>${error.message}</p>
    ${error.requestId && html`<p class="soft">Request <a href=${href("calls", { call: error.requestId })}>${error.requestId}</a></p>`}
    ${again && html`<button class="quiet" onClick=${again}>Try again</button>`}
    ${dismiss && html`<button class="quiet" onClick=${dismiss}>Dismiss</button>`}
  </div>`;
}

// columns: [heading, row => cell, class: "number", "wide" (left out on a phone; "narrow" shows there alone), "name" (cut where it is long), or several]
export function Table({ label, columns, rows, keyOf, empty, foot }) {
  if (!rows.length) return html`<${Empty}>${empty ?? "Nothing in this period."}<//>`;
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0"><table>
    <thead><tr>${columns.map(([heading, , kind]) => html`<th scope="col" class=${kind}>${heading}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${keyOf(row)}>${columns.map(([, cell, kind]) => html`<td class=${kind} onMouseEnter=${kind?.includes("name") ? tell : null}>${cell(row)}</td>`)}</tr>`)}</tbody>
    ${foot && html`<tfoot><tr>${columns.map(([, , kind], place) => html`<td class=${kind}>${foot[place]}</td>`)}</tr></tfoot>`}
  </table></div>`;
}

const tell = ({ currentTarget: cell }) => (cell.title = cell.innerText);

export function Figure({ label, value, exact, children }) {
  return html`<div class="figure"><p class="soft">${label}</p><p class="large" title=${exact}>${typeof value === "string" ? value.replace("−$", "−\u2060$") : value}</p><p class="soft">${children || " "}</p></div>`;
}

// Used, held and left of a limit in one bar; or how far something is that may be full (`isGoal`), in `said` where a share is not enough.
export function Meter({ label, used, held = 0, limit, shown, isGoal = false, said = percent(limit ? used / limit : 1) }) {
  const most = Math.max(Number(limit) || 0, used + held, 1e-12);
  const state = isGoal ? "" : used + held >= limit ? "full" : used + held >= 0.8 * limit ? "near" : "";
  const words = isGoal ? said : `${shown(used)} used${held ? `, ${shown(held)} held` : ""}, ${shown(Math.max(0, limit - used - held))} left of ${shown(limit)}`;
  return html`<div class="meter">
    <p><span>${label}</span><span class="soft">${words}</span></p>
    <svg class=${state} viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${words}`}>
      <rect class="whole" width="100" height="1" /><rect class="held" width=${(100 * (used + held)) / most} height="1" />
      <rect class="used" width=${(100 * used) / most} height="1" />
    </svg>
  </div>`;
}

// What lies over the page; Escape closes it, and focus goes back to where it was.
export function Dialog({ title, kind, close, children }) {
  const panel = useRef();
  useEffect(() => {
    panel.current.showModal();
    return () => panel.current?.close();
  }, []);
  const outside = (event) => event.target === panel.current && close();
  return html`<dialog ref=${panel} class=${kind} aria-label=${title} onCancel=${(event) => (event.preventDefault(), close())} onClick=${outside}>${children}</dialog>`;
}

// A panel beside the page, for one thing.
export const Drawer = ({ title, close, children }) => html`<${Dialog} title=${title} kind="drawer" close=${close}>
  <div class="inside"><div class="drawer-head"><h2>${title}</h2><button class="quiet" onClick=${close}>Close</button></div>${children}</div>
<//>`;

export function Copy({ text, words = "Copy", done = () => {} }) {
  const [said, setSaid] = useState(null);
  const copy = () =>
    navigator.clipboard.writeText(text).then(
      () => (setSaid("Copied"), done()),
      () => setSaid("Not allowed: select it"),
    );
  return html`<button type="button" class="quiet" onClick=${copy}>${said ?? words}</button>`;
}

export function Facts({ rows }) {
  const said = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl>${said.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// ---- data

// Tells the page that something is waited for, until what is returned is called: a line below its head moves.
let awaited = 0;
export function waiting() {
  const mark = (more) => document.getElementById("app").setAttribute("aria-busy", (awaited += more) > 0);
  mark(1);
  return () => mark(-1);
}

// What `path` answers: { data, error, at, again }. While it is asked again, and when that fails, the last answer stays.
// `every`: milliseconds after which it is asked again while the page is seen; null: only by `again`.
export function useData(api, path, { every = null } = {}) {
  const [state, setState] = useState({ path: null, data: null, error: null, at: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    let timer = null;
    const ask = async () => {
      if (!document.hidden || every === null) {
        try {
          const data = await api.get(path, stop.signal);
          setState({ path, data, error: null, at: new Date() });
        } catch (error) {
          if (stop.signal.aborted) return;
          setState((last) => ({ ...last, path, data: last.path === path ? last.data : null, error }));
        }
      }
      if (every !== null && !stop.signal.aborted) timer = setTimeout(ask, every);
    };
    ask();
    return () => (stop.abort(), clearTimeout(timer));
  }, [api, path, every, turn]);
  const again = useCallback(() => setTurn((last) => last + 1), []);
  const isFresh = state.path === path;
  useEffect(() => (path === null || isFresh ? undefined : waiting()), [path, isFresh]);
  return { data: isFresh || state.error === null ? state.data : null, error: isFresh ? state.error : null, at: state.at, again };
}

const GATHERED = 300; // ms in which events are told together
const ANEW = 5000; // ms after which a stream that has ended is opened again

// Hands what `path` streams to `tell`, events of a moment together, while the page is seen and the network is up; returns
// whether it is open. `opened` is called each time: what came before is to be asked for. A path of null streams nothing.
export function useLive(api, path, { tell, opened }) {
  const [isOpen, setOpen] = useState(false);
  const hear = useRef();
  hear.current = { tell, opened };
  useEffect(() => {
    if (path === null) return;
    let stop = null;
    let timer = null;
    let waiting = null;
    let gathered = [];
    const hand = () => {
      hear.current.tell(gathered);
      gathered = [];
      waiting = null;
    };
    const open = async () => {
      clearTimeout(timer);
      if (stop || document.hidden || !navigator.onLine) return;
      const mine = (stop = new AbortController());
      try {
        for await (const event of api.watch(path, mine.signal, () => (setOpen(true), hear.current.opened()))) {
          gathered.push(event);
          waiting ??= setTimeout(hand, GATHERED);
        }
      } catch {
        // who asks for what came meanwhile hears why
      }
      if (stop !== mine) return;
      close();
      timer = setTimeout(open, ANEW);
    };
    const close = () => {
      stop?.abort();
      stop = null;
      clearTimeout(timer);
      setOpen(false);
    };
    const turn = () => (document.hidden || !navigator.onLine ? close() : open());
    for (const name of ["online", "offline"]) addEventListener(name, turn);
    document.addEventListener("visibilitychange", turn);
    open();
    return () => {
      for (const name of ["online", "offline"]) removeEventListener(name, turn);
      document.removeEventListener("visibilitychange", turn);
      clearTimeout(waiting);
      close();
    };
  }, [api, path]);
  return isOpen;
}

// Something that a reader does: { run, error, isBusy, forget }. An error stays until it is forgotten or it is tried again.
export function useAct(act) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const run = async (...said) => {
    setBusy(true);
    setError(null);
    try {
      return await act(...said);
    } catch (failure) {
      setError(failure);
      return undefined;
    } finally {
      setBusy(false);
    }
  };
  return { run, error, isBusy, forget: () => setError(null) };
}
