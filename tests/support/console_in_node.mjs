// Runs the console's own modules in Node against a running gateway, on the few parts of a page's DOM that they use, and
// prints what its reader would see as JSON. Arguments: the console's folder, the gateway's URL, a key, and what to do:
//   admin | team              show the view
//   teams                     show an admin's view, then every further page of teams
//   chat MODEL WORDS          ask in the chat box, and wait until the figures were read again
//   page WRONG_KEY            sign in on the whole page with a wrong key, then with the right one, as a reader does

import { pathToFileURL } from "node:url";

const [folder, url, key, act, ...words] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/${name}`));

class Node_ {
  constructor(name, text = "") {
    Object.assign(this, { name, text, children: [], attributes: {}, listeners: {}, value: "", className: "", hidden: false });
    this.parent = null;
  }
  append(...more) {
    for (const each of more) {
      const child = each instanceof Node_ ? each : new Node_("#text", String(each));
      child.parent = this;
      this.children.push(child);
    }
  }
  replaceChildren(...more) {
    this.children = [];
    this.append(...more);
  }
  remove() {
    if (this.parent !== null) this.parent.children = this.parent.children.filter((each) => each !== this);
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name === "value") this.value = value;
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  get textContent() {
    return this.name === "#text" ? this.text : this.children.map((child) => child.textContent).join(" ");
  }
  set textContent(text) {
    this.replaceChildren(...(text === "" ? [] : [new Node_("#text", text)]));
  }
  all(name) {
    const own = this.name === name ? [this] : [];
    return [...own, ...this.children.flatMap((child) => child.all(name))];
  }
  button(label) {
    return this.all("button").find((each) => each.textContent === label);
  }
  click() {
    return this.listeners.click({ preventDefault() {} });
  }
}

const places = {};
globalThis.Node = Node_;
globalThis.document = {
  createElement: (name) => new Node_(name),
  createTextNode: (text) => new Node_("#text", text),
  getElementById: (id) => (places[id] ??= new Node_(id)),
};
globalThis.sessionStorage = { getItem: () => null, setItem() {} };
const realFetch = globalThis.fetch;
const asked = [];
globalThis.fetch = (path, options) => {
  asked.push(path);
  return realFetch(url + path, options);
};
const realTimeout = globalThis.setTimeout;
globalThis.setTimeout = (done, ms, ...more) => realTimeout(done, Math.min(ms, 50), ...more); // nobody waits here
const until = async (isTrue) => {
  for (let tries = 0; !isTrue() && tries < 1000; tries++) await new Promise((resolve) => realTimeout(resolve, 10));
};

const { Api } = await load("api.js");
const api = new Api(key);
const view = new Node_("div");
const faults = [];
const guarded = async (action) => {
  try {
    return await action();
  } catch (error) {
    return void faults.push(error.message);
  }
};
const read = (node) => node.textContent.replace(/\s+/g, " ");
const seen = {};

if (act === "admin" || act === "teams") await guarded(async () => (await load("admin.js")).showAdmin(api, view, guarded));
if (act === "team" || act === "chat") {
  await guarded(async () => (await load("team.js")).showTeam(api, view, guarded, guarded));
}
if (act === "teams") {
  seen.pages = [read(view)];
  seen.asked = [...asked];
  for (let next; (next = view.button("Next teams")) !== undefined; ) {
    await next.click();
    await until(() => view.button("Next teams") !== next);
    seen.pages.push(read(view));
  }
}
if (act === "chat") {
  const [form] = view.all("form");
  const [model] = view.all("select");
  const [text] = view.all("textarea");
  [model.value, text.value] = words;
  const before = asked.length;
  form.listeners.submit({ preventDefault() {} });
  await until(() => asked.length >= before + 4 && view.button("Stop") === undefined); // the call, and three reports
  await new Promise((resolve) => realTimeout(resolve, 100));
  seen.prompt = text.value;
  const dismiss = view.button("Dismiss");
  if (dismiss !== undefined) {
    seen.before = read(view);
    dismiss.click();
  }
}
if (act === "page") {
  const at = document.getElementById;
  at("notice").hidden = true;
  await load("console.js");
  seen.notices = [];
  const signIn = async (said) => {
    at("key").value = said;
    await at("sign-in").listeners.submit({ preventDefault() {} });
    await until(() => !at("notice").hidden || at("sign-in").hidden);
    seen.notices.push(at("notice").hidden ? null : read(at("notice-words")));
  };
  await signIn(words[0]);
  at("dismiss").click();
  seen.notices.push(at("notice").hidden ? null : read(at("notice-words")));
  await signIn(words[0]);
  await signIn(key);
  view.append(at("view"));
}
const tags = view.all("script").length;
console.log(JSON.stringify({ ...seen, text: read(view), tags, faults }));
process.exit(0); // what the page does later is not awaited
