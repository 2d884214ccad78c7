// Runs the console's own modules in Node against a running gateway, on the few parts of a page's DOM that they use, and
// prints what its reader would see as JSON. Arguments: the console's folder, the gateway's URL, a key, and what to do.

import { pathToFileURL } from "node:url";

const [folder, url, key, act] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/${name}`));

class Node_ {
  constructor(name, text = "") {
    Object.assign(this, { name, text, children: [], attributes: {}, listeners: {}, value: "", className: "", hidden: false });
  }
  append(...more) {
    this.children.push(...more.map((each) => (each instanceof Node_ ? each : new Node_("#text", String(each)))));
  }
  replaceChildren(...more) {
    this.children = [];
    this.append(...more);
  }
  remove() {}
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
    this.children = [new Node_("#text", text)];
  }
  all(name) {
    const own = this.name === name ? [this] : [];
    return [...own, ...this.children.flatMap((child) => child.all(name))];
  }
}

globalThis.Node = Node_;
globalThis.document = { createElement: (name) => new Node_(name), createTextNode: (text) => new Node_("#text", text) };
const realFetch = globalThis.fetch;
globalThis.fetch = (path, options) => realFetch(url + path, options);

const { Api } = await load("api.js");
const api = new Api(key);
const view = new Node_("div");
const faults = [];
const guarded = (action) => action().catch((error) => void faults.push(error.message));

if (act === "admin") await guarded(async () => (await load("admin.js")).showAdmin(api, view, guarded));
if (act === "team" || act === "chat") await guarded(async () => (await load("team.js")).showTeam(api, view, guarded));
if (act === "chat") {
  const [form] = view.all("form");
  const [model] = view.all("select");
  const [text] = view.all("textarea");
  model.value = process.argv[6];
  text.value = process.argv[7];
  form.listeners.submit({ preventDefault() {} });
  while (view.all("button")[0].textContent === "Stop") await new Promise((resolve) => setTimeout(resolve, 10));
  await new Promise((resolve) => setTimeout(resolve, 10));
}
console.log(JSON.stringify({ text: view.textContent.replace(/\s+/g, " "), tags: view.all("script").length, faults }));
process.exit(0); // what the page does later is not awaited
