// The console's frame: sign-in, navigation, and the view that the address names. Every view is a URL: its filters and its
// period are in the query, so that it can be sent to a colleague; the key never is.

import { Api, whoseIs } from "./api.js";
import { Dialog, Problem, html, href, render, useAct, useEffect, useMemo, useRef, useState, waiting } from "./ui.js";

const MEMORY = "tollgate-key"; // in the tab's session storage, forgotten when the tab closes
const READERS = ["viewer", "finance", "operator", "admin"];
const EVERYBODY = ["team", "team-admin", ...READERS];
const ONE_TEAM = ["team-admin", ...READERS]; // who may see what is one team's, beside the team
// name: [heading, who may see it]
const VIEWS = {
  overview: ["Overview", EVERYBODY],
  calls: ["Calls", EVERYBODY],
  budgets: ["Budgets", ["team", ...READERS]],
  teams: ["Teams and keys", ONE_TEAM],
  models: ["Models", EVERYBODY],
  tools: ["Tools", EVERYBODY],
  playground: ["Playground", EVERYBODY],
  routing: ["Routing", EVERYBODY],
  batches: ["Batches", ["team", ...READERS]],
  fleet: ["Engine fleet", READERS],
  finance: ["Finance", READERS],
  audit: ["Audit log", ONE_TEAM],
};
// Where people sign in, and who the reader's session is: { name, identity }, as the gateway wrote it into the page.
const SIGN_IN = JSON.parse(document.querySelector("meta[name=sign-in]")?.content ?? "null");
const REFUSED = {
  no_role: "You are known there, but have no role here. Ask those who run this gateway.",
  cancelled: "The sign-in was cancelled.",
  expired: "The sign-in took too long, or began in another window. Try again.",
  away: "The identity provider does not answer. Try again in a minute.",
  failed: "The sign-in failed; the gateway’s log says why.",
};

// What the address asks for: { view, query }.
function place() {
  const view = location.pathname.split("/")[2] || "overview";
  return { view: view in VIEWS ? view : "overview", query: Object.fromEntries(new URLSearchParams(location.search)) };
}

function App() {
  const [at, setAt] = useState(place);
  const [key, setKey] = useState(() => sessionStorage.getItem(MEMORY));
  const [refused, setRefused] = useState(() => refusalOf(at.query)); // the last key that was not taken, and why: { key, error }
  const [session, setSession] = useState(SIGN_IN?.identity ?? null);
  const [over, setOver] = useState(null); // the Api of what is shown, whose key or session has ended: { api, error }
  const [visit, setVisit] = useState(0); // another one for a reader who may not see what the one before was shown
  const [, turn] = useState(0);
  const api = useMemo(() => {
    const options = { identity: key ? null : session, learned: () => turn((last) => last + 1) };
    const end = (error, of) => (of.whose ? setOver({ api: of, error }) : leave({ key, error }));
    return (key || session) && new Api(key, end, options);
  }, [key, session]);

  useEffect(() => {
    const follow = () => setAt(place());
    const click = (event) => {
      const link = event.target.closest?.("a[href^='/console']");
      if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      history.pushState(null, "", link.href);
      follow();
    };
    addEventListener("popstate", follow);
    document.addEventListener("click", click);
    return () => (removeEventListener("popstate", follow), document.removeEventListener("click", click));
  }, []);

  const leave = (why = null) => {
    sessionStorage.removeItem(MEMORY);
    setRefused(why);
    setKey(null);
    setSession(null);
    setOver(null);
  };
  const signOut = async () => {
    if (!key) await api.call("POST", "/console/sign-out").catch(() => {}); // one that has ended needs no end
    leave();
  };
  const enter = (said) => {
    sessionStorage.setItem(MEMORY, said);
    setRefused(null);
    setKey(said);
  };
  const goOn = (said, who) => {
    if (whoseIs(who) !== over.api.whose) setVisit(visit + 1);
    setOver(null);
    if (said) enter(said);
    else setSession(who);
  };
  // Changes the query, or the view too; `replace` leaves no step to go back to.
  const go = (changes, { view = at.view, replace = false } = {}) => {
    const query = view === at.view ? { ...at.query, ...changes } : changes;
    history[replace ? "replaceState" : "pushState"](null, "", href(view, query));
    setAt(place());
  };
  if (!api) return html`<${SignIn} enter=${enter} refused=${refused} />`;
  return html`<${Frame} key=${visit} api=${api} at=${at} go=${go} leave=${signOut} />
    ${over?.api === api && html`<${SignInAgain} error=${over.error} isSession=${!key} goOn=${goOn} leave=${() => leave()} />`}`;
}

// Why the gateway did not let a person in who comes back from the identity provider.
function refusalOf(query) {
  return query.refused in REFUSED ? { key: null, error: { message: REFUSED[query.refused] } } : null;
}

function SignIn({ enter, refused }) {
  const [said, setSaid] = useState(refused?.key ?? ""); // to be mended, not typed anew
  const field = useRef();
  useEffect(() => field.current.focus(), [refused]);
  const submit = (event) => {
    event.preventDefault();
    if (said.trim()) enter(said.trim());
  };
  const there = location.search.includes("refused=") ? "/console" : location.pathname + location.search;
  const signIn = () => location.assign(`/console/sign-in?${new URLSearchParams({ there })}`);
  return html`<main class="sign-in">
    <p class="brand"><span class="mark" aria-hidden="true"></span>Tollgate</p>
    <h1>${SIGN_IN ? "Sign in" : "Sign in with a key"}</h1>
    ${SIGN_IN && html`<button class="main" onClick=${signIn}>Sign in with ${SIGN_IN.name}</button>`}
    <p class="soft">A team’s key shows that team. An admin’s key shows the whole deployment.</p>
    <form onSubmit=${submit}>
      <label for="key">Key</label>
      <input id="key" ref=${field} type="password" autocomplete="off" spellcheck=${false} required
        placeholder="tg-… or tgadmin-…" value=${said} onInput=${(event) => setSaid(event.target.value)}
        aria-describedby=${refused ? "refused" : null} />
      ${refused && html`<p id="refused" class="bad" role="alert">${refused.error.message}</p>`}
      <button class=${SIGN_IN ? "" : "main"}>${SIGN_IN ? "Sign in with the key" : "Sign in"}</button>
    </form>
    <p class="soft">The key stays in this browser tab and is forgotten when you close it.</p>
  </main>`;
}

// Over a page whose key or session has ended: what was typed there stays for a reader who may see the same.
function SignInAgain({ error, isSession, goOn, leave }) {
  const act = useAct(async (said) => goOn(said, await new Api(said || null).ask()));
  const submit = (event) => {
    event.preventDefault();
    act.run(isSession ? null : new FormData(event.target).get("key").trim());
  };
  return html`<${Dialog} title="Sign in again" kind="again" close=${() => {}}><form onSubmit=${submit}>
    <h2>Sign in again</h2>
    <p role="alert">${error.message} What you have typed is still there.</p>
    ${isSession
      ? html`<p><a href="/console/sign-in?there=/console" target="_blank" rel="opener">Sign in with ${SIGN_IN.name}</a> in another tab, then go on here.</p>`
      : html`<label for="again">Key</label><input id="again" name="key" type="password" autocomplete="off" spellcheck=${false} required placeholder="tg-… or tgadmin-…" />`}
    ${act.error && html`<p class="bad" role="alert">${act.error.message}</p>`}
    <button class="main" disabled=${act.isBusy}>Go on</button>
    <button type="button" class="quiet" onClick=${leave}>Leave, and lose it</button>
  </form><//>`;
}

function Frame({ api, at, go, leave }) {
  const { role, identity } = api;
  const rank = identity?.role ?? role;
  const view = VIEWS[at.view][1].includes(rank) ? at.view : "overview";
  const [heading] = VIEWS[view];
  const main = useRef();
  useEffect(() => {
    document.title = `${heading} · Tollgate`;
    const nav = document.querySelector("nav");
    nav.scrollLeft = nav.querySelector("[aria-current]").offsetLeft - nav.clientWidth / 3; // on a phone it is one line
  }, [heading]);
  return html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}>Skip to content</a>
    <header>
      <p class="brand"><span class="mark" aria-hidden="true"></span>Tollgate</p>
      <${FindCall} go=${go} />
      <p class="who">${rank[0].toUpperCase() + rank.slice(1)} <span class="soft key" title=${api.key && `${api.key.slice(0, 9)}…`}>${api.own ?? (api.key ? `${api.key.slice(0, 9)}…` : identity.name)}</span></p>
      <button class="quiet" onClick=${() => leave()}>Sign out</button>
    </header>
    <nav aria-label="Views">
      ${Object.entries(VIEWS)
        .filter(([, [, roles]]) => roles.includes(rank))
        .map(([name, [words]]) => {
          const kept = ["period", "team"].filter((each) => each in at.query).map((each) => [each, at.query[each]]);
          const to = href(name, Object.fromEntries(kept));
          return html`<a key=${name} href=${to} aria-current=${name === view ? "page" : null}>${words}</a>`;
        })}
    </nav>
    <main id="main" ref=${main} tabindex="-1">
      <h1>${heading}</h1>
      <${View} key=${view} name=${view} api=${api} role=${role} query=${at.query} go=${go} />
    </main>`;
}

// From a request id, as every answer and every error carries it, to its call.
function FindCall({ go }) {
  const [said, setSaid] = useState("");
  const submit = (event) => {
    event.preventDefault();
    if (said.trim()) go({ call: said.trim() }, { view: "calls" });
  };
  return html`<form class="find" role="search" aria-label="Calls" onSubmit=${submit}>
    <input type="search" aria-label="Find a call by its request id" placeholder="Find a call: request id" value=${said}
      spellcheck=${false} autocomplete="off" onInput=${(event) => setSaid(event.target.value)} />
  </form>`;
}

// Views are loaded when they are first shown.
function View({ name, ...shared }) {
  const [loaded, setLoaded] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    import(`./views/${name}.js`).then((module) => setLoaded(() => module.default), setError);
  }, [name]);
  useEffect(() => (loaded || error ? undefined : waiting()), [loaded, error]);
  if (error) return html`<${Problem} error=${error} />`;
  return loaded && html`<${loaded} ...${shared} />`;
}

render(html`<${App} />`, document.getElementById("app"));
