// Up to four models side by side on one prompt: first token, tokens a second and cost of each; the same call as curl,
// Python or JavaScript. An error stands in its pane until it is dismissed, and the prompt stays until all have answered.

import { useTeamKey } from "../team_key.js";
import { Copy, Problem, count, duration, html, href, usdWith, useData, useEffect, useMemo, useRef, useState } from "../ui.js";

const MOST = 4; // models at once

export default function Playground(props) {
  const [api, field] = useTeamKey(props.api);
  return field ?? html`<${Panes} api=${api} query=${props.query} go=${props.go} />`;
}

function Panes({ api, query, go }) {
  const { data, error, again } = useData(api, "/v1/models");
  const offered = data ? data.data.filter((model) => !model.abilities || model.abilities.includes("chat")) : [];
  const chosen = (query.models ? query.models.split(",").slice(0, MOST) : offered.slice(0, 1).map((model) => model.id)).filter(Boolean);
  const choose = (models) => go({ models: models.join(",") }, { replace: true });
  const [prompt, setPrompt] = useState("");
  const [round, setRound] = useState(null); // { words, number, open, failed }
  const running = useRef(null);
  const isBusy = round !== null && round.open > 0;
  const send = (event) => {
    event?.preventDefault();
    if (isBusy) return running.current.abort();
    if (!prompt.trim()) return;
    running.current = new AbortController();
    setRound((last) => ({ words: prompt.trim(), number: (last?.number ?? 0) + 1, open: chosen.length, failed: 0 }));
  };
  const ended = (isAnswered) =>
    setRound((last) => ({ ...last, open: last.open - 1, failed: last.failed + (isAnswered ? 0 : 1) }));
  useEffect(() => {
    if (round && round.open === 0 && round.failed === 0) setPrompt(""); // else it is there to be sent again
  }, [round]);
  useEffect(() => () => running.current?.abort(), []);
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isBusy) send(event);
  };
  if (error && !data) return html`<${Problem} error=${error} again=${again} />`;
  if (!data) return null;
  return html`
    <form onSubmit=${send}>
      <label for="prompt">Message</label>
      <textarea id="prompt" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${onKey} placeholder="Ask all of them the same; Enter sends"></textarea>
      <div class="bar">
        <button class="main">${isBusy ? "Stop" : "Send"}</button>
        ${chosen.length < MOST && html`<button type="button" onClick=${() => choose([...chosen, offered.find((model) => !chosen.includes(model.id))?.id ?? offered[0].id])}>Add a model</button>`}
        <label>User <input size="10" value=${query.user ?? ""} onChange=${(event) => go({ user: event.target.value.trim() }, { replace: true })} placeholder="none" autocomplete="off" /></label>
        <span class="soft">${left(api)}</span>
        <${CopyAs} model=${chosen[0]} user=${query.user} prompt=${prompt || round?.words || "Hello"} />
      </div>
    </form>
    <div class="panes">
      ${chosen.map((model, place) => html`<${Pane} key=${`${place} ${model}`} api=${api} model=${model} offered=${offered} round=${round} ended=${ended} signal=${running} user=${query.user}
          turnTo=${(name) => choose(chosen.with(place, name))} remove=${chosen.length > 1 ? () => choose(chosen.toSpliced(place, 1)) : null} />`)}
    </div>`;
}

// What the last answer said is left of the minute.
function left(api) {
  const said = Object.entries(api.left).filter(([, one]) => Date.now() - one.at < 60_000);
  if (!said.length) return "Charged to the team.";
  return `Left of this minute: ${said.map(([kind, one]) => `${count(one.remaining)} of ${count(one.limit)} ${kind}`).join(", ")}`;
}

function Pane({ api, model, user, offered, round, ended, signal, turnTo, remove }) {
  const [messages, setMessages] = useState([]);
  const [text, setText] = useState(""); // of the answer that runs
  const [error, setError] = useState(null);
  const [told, setTold] = useState(null); // of the last answer
  const log = useRef();
  useEffect(() => {
    if (round === null) return;
    const asked = [...messages.filter((message) => !message.unanswered), { role: "user", content: round.words }];
    setMessages(asked);
    setError(null);
    setTold(null);
    ask(asked);
  }, [round?.number]);
  useEffect(() => {
    log.current.scrollTop = log.current.scrollHeight;
  }, [messages, text, error]);

  const ask = async (asked) => {
    const began = performance.now();
    let said = "";
    let first = null;
    let failure = null;
    try {
      const pieces = api.chat(model, asked, user, signal.current.signal);
      let piece = await pieces.next();
      for (; !piece.done; piece = await pieces.next()) {
        first ??= performance.now();
        setText((said += piece.value));
      }
      const { usage, model_used, requestId } = piece.value;
      const seconds = (performance.now() - (first ?? began)) / 1000;
      setTold({ usage, model_used, requestId, first: first === null ? null : first - began, rate: usage && seconds > 0 ? usage.completion_tokens / seconds : null });
    } catch (caught) {
      failure = caught.name === "AbortError" ? new Error("Stopped. What was answered so far is charged.") : caught;
      setError(failure);
    }
    setText("");
    setMessages(said ? [...asked, { role: "assistant", content: said }] : [...asked.slice(0, -1), { ...asked.at(-1), unanswered: true }]);
    ended(failure === null);
  };
  const dismiss = () => {
    setError(null);
    setMessages((all) => all.filter((message) => !message.unanswered));
  };
  return html`<section class="pane">
    <div class="row">
      <select aria-label="Model" value=${model} onChange=${(event) => turnTo(event.target.value)}>
        ${!offered.some((each) => each.id === model) && html`<option value=${model}>${model}</option>`}
        ${offered.map((each) => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}
      </select>
      ${remove && html`<button type="button" class="quiet" aria-label=${`Remove ${model}`} onClick=${remove}>Remove</button>`}
    </div>
    <div class="log" ref=${log} role="log" aria-label=${`Conversation with ${model}`} tabindex="0">
      ${messages.map((message) => html`<div class="said ${message.role}">${message.content}</div>`)}
      ${text && html`<div class="said assistant">${text}</div>`}
      ${error && html`<${Problem} error=${error} dismiss=${dismiss} />`}
    </div>
    <p class="soft">${told?.usage
      ? html`${told.model_used}: <a href=${href("calls", { call: told.requestId })}>${count(told.usage.total_tokens)} tokens</a>, ${usdWith(told.usage.cost_usd, 6)},
          first token ${duration(told.first)}, ${told.rate === null ? "–" : told.rate.toFixed(1)} tokens/s`
      : " "}</p>
  </section>`;
}

function CopyAs({ model, user, prompt }) {
  const made = useMemo(() => {
    const url = `${location.origin}/v1`;
    const body = JSON.stringify({ model, messages: [{ role: "user", content: prompt }], user: user || undefined }, null, 2);
    const indented = body.replaceAll("\n", "\n  ");
    return {
      curl: `curl ${url}/chat/completions \\\n  -H "authorization: Bearer $TOLLGATE_KEY" \\\n  -H "content-type: application/json" \\\n  -d '${body.replaceAll("'", "'\\''")}'`,
      Python: `import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(url)}, api_key=os.environ["TOLLGATE_KEY"])\nanswer = client.chat.completions.create(\n    model=${JSON.stringify(model)},\n    messages=[{"role": "user", "content": ${JSON.stringify(prompt)}}],\n${user ? `    user=${JSON.stringify(user)},\n` : ""})\nprint(answer.choices[0].message.content)`,
      JavaScript: `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${JSON.stringify(url)}, apiKey: process.env.TOLLGATE_KEY });\nconst answer = await client.chat.completions.create(${indented});\nconsole.log(answer.choices[0].message.content);`,
    };
  }, [model, user, prompt]);
  return html`<span class="end">${Object.entries(made).map(([name, text]) => html`<${Copy} key=${name + text} text=${text} words=${`Copy as ${name}`} />`)}</span>`;
}
