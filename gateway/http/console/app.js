// The console's frame: sign-in, navigation, and the view that the address names. Every view is a URL: its filters and its
// period are in the query, so that it can be sent to a colleague; the key never is.

import { Api } from "./api.js";
import { Problem, html, href, render, useEffect, useMemo, useRef, useState } from "./ui.js";

const MEMORY = "tollgate-key"; // in the tab's session storage, forgotten when the tab closes
const EVERYBODY = ["team", "admin"];
// name: [heading, who may see it]
const VIEWS = {
  overview: ["Overview", EVERYBODY],
  calls: ["Calls", EVERYBODY],
  budgets: ["Budgets", EVERYBODY],
  teams: ["Teams and keys", ["admin"]],
  models: ["Models", EVERYBODY],
  playground: ["Playground", EVERYBODY],
  routing: ["Routing", EVERYBODY],
  batches: ["Batches", EVERYBODY],
  fleet: ["Engine fleet", ["admin"]],
  finance: ["Finance", ["admin"]],
  audit: ["Audit log", ["admin"]],
};

// What the address asks for: { view, query }.
function place() {
  const view = location.pathname.split("/")[2] || "overview";
  return { view: view in VIEWS ? view : "overview", query: Object.fromEntries(new URLSearchParams(location.search)) };
}

function App() {
  const [at, setAt] = useState(place);
  const [key, setKey] = useState(() => sessionStorage.getItem(MEMORY));
  const [refused, setRefused] = useState(null); // the last key that was not taken, and why: { key, error }
  const api = useMemo(() => key && new Api(key, (error) => leave({ key, error })), [key]);

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
  };
  const enter = (said) => {
    sessionStorage.setItem(MEMORY, said);
    setRefused(null);
    setKey(said);
  };
  // Changes the query, or the view too; `replace` leaves no step to go back to.
  const go = (changes, { view = at.view, replace = false } = {}) => {
    const query = view === at.view ? { ...at.query, ...changes } : changes;
    history[replace ? "replaceState" : "pushState"](null, "", href(view, query));
    setAt(place());
  };
  if (!key) return html`<${SignIn} enter=${enter} refused=${refused} />`;
  return html`<${Frame} api=${api} at=${at} go=${go} leave=${leave} />`;
}

function SignIn({ enter, refused }) {
  const [said, setSaid] = useState(refused?.key ?? ""); // to be mended, not typed anew
  const field = useRef();
  useEffect(() => field.current.focus(), [refused]);
  const submit = (event) => {
    event.preventDefault();
    if (said.trim()) enter(said.trim());
  };
  return html`<main class="sign-in">
    <p class="brand"><span class="mark" aria-hidden="true"></span>Tollgate</p>
    <h1>Sign in with a key</h1>
    <p class="soft">A team’s key shows that team. An admin’s key shows the whole deployment.</p>
    <form onSubmit=${submit}>
      <label for="key">Key</label>
      <input id="key" ref=${field} type="password" autocomplete="off" spellcheck=${false} required
        placeholder="tg-… or tgadmin-…" value=${said} onInput=${(event) => setSaid(event.target.value)}
        aria-describedby=${refused ? "refused" : null} />
      ${refused && html`<p id="refused" class="bad" role="alert">${refused.error.message}</p>`}
      <button class="main">Sign in</button>
    </form>
    <p class="soft">The key stays in this browser tab and is forgotten when you close it.</p>
  </main>`;
}

function Frame({ api, at, go, leave }) {
  const { role } = api;
  const view = VIEWS[at.view][1].includes(role) ? at.view : "overview";
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
      <p class="who">${role === "admin" ? "Admin" : "Team"} <span class="soft key">${api.key.slice(0, 9)}…</span></p>
      <button class="quiet" onClick=${() => leave()}>Sign out</button>
    </header>
    <nav aria-label="Views">
      ${Object.entries(VIEWS)
        .filter(([, [, roles]]) => roles.includes(role))
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
  if (error) return html`<${Problem} error=${error} />`;
  return loaded && html`<${loaded} ...${shared} />`;
}

render(html`<${App} />`, document.getElementById("app"));
