// Where a prompt would go, without calling anything: the score, the targets in order with what they would cost, and who
// was left out and why.

import { useTeamKey } from "../team_key.js";
import { Problem, State, Table, duration, html, usdWith, useAct, useData, useState } from "../ui.js";

export default function Routing(props) {
  const [api, field] = useTeamKey(props.api);
  return field ?? html`<${Explain} api=${api} query=${props.query} go=${props.go} />`;
}

function Explain({ api, query, go }) {
  const models = useData(api, "/v1/models");
  const offered = models.data ? models.data.data.map((model) => model.id) : [];
  const model = query.model ?? (offered.includes("auto") ? "auto" : offered[0]);
  const [prompt, setPrompt] = useState("");
  const [route, setRoute] = useState(null);
  const act = useAct(async () => setRoute(await api.call("POST", "/v1/route", { model, messages: [{ role: "user", content: prompt }] })));
  const submit = (event) => (event.preventDefault(), prompt.trim() && act.run());
  if (models.error && !models.data) return html`<${Problem} error=${models.error} again=${models.again} />`;
  if (!models.data) return null;
  return html`
    <form onSubmit=${submit}>
      <label for="prompt">Prompt</label>
      <textarea id="prompt" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} placeholder="Paste a prompt. Nothing is called or charged."></textarea>
      <div class="bar">
        <label>Model <select value=${model} onChange=${(event) => go({ model: event.target.value }, { replace: true })}>
          ${offered.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
        <button class="main" disabled=${act.isBusy}>Explain</button>
      </div>
    </form>
    ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
    ${route && html`<${Shown} route=${route} />`}`;
}

function Shown({ route }) {
  const targets = [
    ["Model", (target) => target.model],
    ["At", (target) => html`${target.provider}<span class="soft">, ${target.region}</span>`, "wide"],
    ["State", (target) => html`<${State} of=${target.is_available ? "active" : "open"} />`],
    ["First token", (target) => duration(target.first_token_ms), "number wide"],
    ["Expected", (target) => usdWith(target.expected_cost_usd, 6), "number"],
    ["At most", (target) => usdWith(target.most_cost_usd, 6), "number wide"],
  ];
  const leftOut = [["Model", (one) => one.model], ["Why", (one) => one.reasons.join("; "), "long"]];
  return html`
    <div><p class="large">${route.model_used}</p><p>${route.explanation}</p></div>
    ${route.small_suffices !== null && html`<${Scale} score=${route.small_suffices} quality=${route.quality} />`}
    <section><h2>Targets, in their order</h2><${Table} label="Targets" columns=${targets} rows=${route.targets} keyOf=${(one) => one.model + one.provider + one.region} /></section>
    <section><h2>Left out</h2><${Table} label="Left out" columns=${leftOut} rows=${route.left_out} keyOf=${(one) => one.model} empty="No model that this name stands for was left out." /></section>`;
}

// The score on its scale from 0 to 1, with the threshold in force.
function Scale({ score, quality }) {
  return html`<section class="meter"><p><span>Chance that a small model suffices: ${score.toFixed(3)}</span><span class="soft">small from ${quality} on</span></p>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${`${score.toFixed(3)}, threshold ${quality}`} height="12">
      <rect class="whole" y="2" width="100" height="2" /><rect class="used" y="2" width=${100 * score} height="2" /><rect class="mark-at" x=${100 * quality} width="0.4" height="6" />
    </svg></section>`;
}
