// Where a prompt would go, without calling anything: the score, the targets in order with what they would cost, and who
// was left out and why. Beside it, what each threshold of a route costs and brings, with the one in force.

import { useTeamKey } from "../team_key.js";
import { Problem, State, Table, count, duration, html, path, percent, usdTicks, usdWith, useAct, useData, useEffect, useState } from "../ui.js";

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
    ${route && html`<${Shown} route=${route} />`}
    ${models.data.data.some((one) => one.id === model && one.owned_by === "tollgate") && html`<${Thresholds} key=${model} api=${api} route=${model} />`}`;
}

// ---- what thresholds cost and bring

function Thresholds({ api, route }) {
  const { data, error, again } = useData(api, path("/v1/route/curve", { route }));
  const [Curve, setCurve] = useState(null);
  useEffect(() => {
    import("../chart.js").then((module) => setCurve(() => module.Curve), () => {});
  }, []);
  if (error?.code === "route_not_found") return null; // another name of one model
  if (error && !data) return html`<${Problem} error=${error} again=${again} />`;
  if (!data) return null;
  const isOwn = data.curve.length > 1;
  const { points, across, up, rests } = isOwn ? ownCurve(data) : shippedCurve(data.shipped);
  const words = ({ quality, x, y, share_large: large }) => `Threshold ${Number(quality.toFixed(2))}: ${percent(1 - large)} of calls to small models, ${across.one(x)}, ${percent(y)} ${up.one}`;
  const mark = between(points, data.applied_quality);
  return html`<section><h2>What a threshold costs and brings</h2>
    <div class="chart">${Curve && html`<${Curve} label=${`${up.name} over ${across.name}`} across=${across} up=${up}
      points=${points.map((point) => ({ ...point, words: words(point) }))} mark=${{ ...mark, words: `${words(mark)}; in force` }} />`}</div>
    <p class="soft">${rests}</p>
  </section>`;
}

const SHARES = (ticks) => ticks.map((value) => `${Math.round(100 * value)} %`);
const DOLLARS = { name: "Dollars a call", ticks: usdTicks, one: (value) => `${usdWith(value, 6)} a call` };
const CALLS = { name: "Calls to the large models", ticks: SHARES, one: (value) => `${percent(value)} to large ones` }; // where a price is not known

// What the team's own compared calls say: an answer of the large model counts as good as itself.
function ownCurve({ curve, calls }) {
  const points = curve.map(({ quality, share_large, small_suffices, usd_per_call }) => ({
    quality, share_large, x: Number(usd_per_call), y: share_large + (1 - share_large) * (small_suffices ?? 0),
  }));
  const up = { name: "Answers as good as the large model’s", ticks: SHARES, one: "as good as the large model" };
  return { points, across: DOLLARS, up, rests: `From ${count(calls.compared)} compared calls of this team.` };
}

// What the shipped model's card says, at the prices of this route.
function shippedCurve({ curve, rows, call, small_right, large_right }) {
  const isPriced = curve.every((point) => point.usd_per_call !== null);
  const points = curve.map(({ quality, share_large, share_right, usd_per_call }) => ({
    quality, share_large, x: isPriced ? Number(usd_per_call) : share_large, y: share_right,
  }));
  const up = { name: "Answers that are right", ticks: SHARES, one: "right" };
  const said = `From the shipped model’s card (${rows}: small alone ${percent(small_right)} right, large alone ${percent(large_right)})`;
  const at = isPriced ? `, for a call of ${count(call.input_tokens)} tokens in and ${count(call.output_tokens)} out at this route’s prices` : "";
  return { points, across: isPriced ? DOLLARS : CALLS, up, rests: `${said}${at}. Compare calls of your own to see your curve: held_back in tollgate.yaml.` };
}

// The point of a threshold on the curve, between the two that are known beside it.
function between(points, quality) {
  const after = points.findIndex((point) => point.quality >= quality);
  if (after <= 0) return { ...points.at(after), quality };
  const [low, high] = [points[after - 1], points[after]];
  const part = (quality - low.quality) / (high.quality - low.quality);
  const at = (name) => low[name] + part * (high[name] - low[name]);
  return { quality, x: at("x"), y: at("y"), share_large: at("share_large") };
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
