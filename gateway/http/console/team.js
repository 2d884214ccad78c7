// A team's own view: what it used, what it has left, and a box to try a model in.

import { SUMS, card, count, day, el, figure, table, usd } from "./dom.js";

const SETTLED_AFTER = 2500; // ms until a call shows in the reports
const MINUTE = 60_000; // ms for which what is left of a minute is known

// Shows the view and returns how to fill it anew, which leaves the conversation alone. `guarded` runs what the reader
// asks for, `behind` what happens by itself.
export async function showTeam(api, view, guarded, behind) {
  const figures = el("div", { class: "grid" });
  const limits = el("section", { class: "card" });
  const usage = el("section", { class: "card" });
  const fill = async () => {
    const today = new Date().toISOString().slice(0, 10);
    const [team, used, month] = await Promise.all([
      api.get("/v1/team"),
      api.get(`/v1/usage?date=${today}&group_by=model`),
      api.get(`/v1/usage?from=${today.slice(0, 8)}01&to=${today}&group_by=day`),
    ]);
    figures.replaceChildren(...figureCards(team.key, used.total, month.total));
    limits.replaceChildren(...limitLines(team, used.total, month.total, api.left));
    usage.replaceChildren(
      el("h2", {}, "Usage"),
      table(`By model, ${today} (UTC)`, [["Model", (line) => el("code", {}, line.model)], ...SUMS], used.results),
      table("This month by day", [["Day", (line) => line.day], ...SUMS], month.results),
    );
  };
  const [models] = await Promise.all([api.get("/v1/models"), fill()]);
  const later = () => setTimeout(() => behind(fill), SETTLED_AFTER);
  const columns = [chatCard(api, models.data, later), el("div", {}, limits, usage)];
  view.replaceChildren(figures, el("div", { class: "columns" }, columns));
  return fill;
}

function figureCards(key, today, month) {
  return [
    figure("Cost today", usd(today.cost_usd), corrected(today)),
    figure("Cost this month", usd(month.cost_usd), corrected(month)),
    figure("Requests today", count(today.requests)),
    figure("Key", key.name || key.key_id, key.expires_at ? `expires ${day(key.expires_at)}` : "does not expire"),
  ];
}

// What was booked beside the calls, if anything was.
function corrected(total) {
  return total.corrections ? `and ${usd(total.corrections.cost_usd)} of corrections` : null;
}

function owed(total) {
  return total.cost_usd + (total.corrections?.cost_usd ?? 0);
}

function limitLines(team, today, month, left) {
  const limits = team.limits;
  const late = today.corrections ?? { input_tokens: 0, output_tokens: 0 };
  const tokens = today.input_tokens + today.output_tokens + late.input_tokens + late.output_tokens;
  const lines = [
    ["Dollars today", limits.usd_per_day, limits.usd_per_day - owed(today), usd],
    ["Dollars this month", limits.usd_per_month, limits.usd_per_month - owed(month), usd],
    ["Tokens today", limits.tokens_per_day, limits.tokens_per_day - tokens, count],
    minuteLine("Requests a minute", limits.requests_per_minute, left.requests),
    minuteLine("Tokens a minute", limits.tokens_per_minute, left.tokens),
    ["Requests at once", limits.concurrent_requests, null, count],
  ].filter(([, limit]) => limit !== null);
  const title = el("h2", {}, "Left of the team’s limits");
  if (lines.length === 0) return [title, el("p", { class: "hint" }, "This team has no limits.")];
  return [title, ...lines.map(limitLine)];
}

// What the last answer said is left, by the tighter of the team's and the key's limits; a minute later nothing is known.
function minuteLine(label, limit, last) {
  const isKnown = last !== undefined && Date.now() - last.at < MINUTE;
  return isKnown ? [label, last.limit, last.remaining, count] : [label, limit, null, count];
}

function limitLine([label, limit, rest, shown]) {
  if (rest === null) {
    return el("div", { class: "limit" }, el("p", {}, el("span", {}, label), el("span", {}, `at most ${shown(limit)}`)));
  }
  const left = Math.max(0, rest);
  const most = limit || 1;
  const bar = el("meter", { min: 0, max: most, value: left, low: most * 0.2, optimum: most, "aria-label": `${label}: left` });
  return el("div", { class: "limit" }, el("p", {}, el("span", {}, label), el("span", {}, `${shown(left)} of ${shown(limit)}`)), bar);
}

function chatCard(api, models, whenDone) {
  const messages = [];
  let running = null;
  const usable = models.filter((model) => !model.abilities || model.abilities.includes("chat"));
  const log = el("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  const model = el("select", { name: "model" }, usable.map((each) => el("option", { value: each.id }, each.id)));
  const text = el("textarea", { name: "text", rows: 2, required: true, placeholder: "Say something" });
  const send = el("button", { type: "submit" }, "Send");
  const hint = el("p", { class: "hint", role: "status" }, "Each answer is charged to the team like any other.");
  const stop = () => running?.abort();
  const say = (role, words) => {
    const said = el("div", { class: `said ${role}` }, words);
    log.append(said);
    log.scrollTop = log.scrollHeight;
    return said;
  };
  const ask = async () => {
    const words = text.value.trim();
    if (!words || running !== null) return;
    messages.push({ role: "user", content: words });
    const asked = say("user", words);
    text.value = "";
    const said = say("assistant busy", "");
    running = new AbortController();
    send.textContent = "Stop";
    try {
      const pieces = api.chat(model.value, messages, running.signal);
      let piece = await pieces.next();
      while (!piece.done) {
        said.append(piece.value);
        log.scrollTop = log.scrollHeight;
        piece = await pieces.next();
      }
      const { usage, model_used } = piece.value;
      if (usage) hint.textContent = `${model_used}: ${count(usage.total_tokens)} tokens, ${usd(usage.cost_usd)}.`;
    } catch (error) {
      if (error.name === "AbortError") hint.textContent = "Stopped; what was answered so far is charged.";
      else keep(error, said.textContent ? null : asked);
    } finally {
      running = null;
      send.textContent = "Send";
      said.className = "said assistant";
      if (said.textContent) messages.push({ role: "assistant", content: said.textContent });
      else {
        messages.pop();
        said.remove();
        text.value ||= words; // to be sent again
      }
      whenDone();
    }
  };
  // Shows what went wrong in the conversation until its reader dismisses it; then the message that had no answer goes, too.
  const keep = (error, unanswered) => {
    const dismiss = () => {
      failed.remove();
      unanswered?.remove();
    };
    const button = el("button", { type: "button", class: "quiet", onclick: dismiss }, "Dismiss");
    const where = error.requestId ? el("p", { class: "hint" }, "Request ", el("code", {}, error.requestId)) : null;
    const failed = el("div", { class: "said failed", role: "alert" }, el("p", {}, error.message), where, button);
    log.append(failed);
    log.scrollTop = log.scrollHeight;
  };
  const submit = (event) => {
    event.preventDefault();
    if (running !== null) stop();
    else ask();
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && running === null) submit(event);
  });
  send.addEventListener("click", (event) => {
    if (running === null) return;
    event.preventDefault();
    stop();
  });
  const form = el("form", { onsubmit: submit }, el("label", {}, "Model", model), log, el("label", {}, "Message", text), send);
  return el("section", { class: "card" }, el("h2", {}, "Try a model"), form, hint);
}
