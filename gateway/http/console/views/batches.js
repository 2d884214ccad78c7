// Batches: how far each is, when it will be done, what failed; they can be cancelled, and a team downloads its results.

import { Drawer, Facts, Meter, Problem, State, Table, clock, count, href, html, path, usd, usdWith, useAct, useData, when, whole } from "../ui.js";

const STATUSES = ["in_progress", "completed", "failed", "expired", "cancelled"];

export default function Batches({ api, role, query, go }) {
  const list = role === "admin"
    ? path("/admin/batches", { team_id: query.team, status: query.status, after: query.after, limit: 50 })
    : path("/v1/batch", { after: query.after, limit: 50 });
  const { data, error, again } = useData(api, list, { every: 5000 });
  const columns = [
    ["Made, UTC", (batch) => html`<a href=${href("batches", { ...query, batch: batch.batch_id })}>${when(batch.created_at)}</a>`],
    ["Status", (batch) => html`<${State} of=${batch.status} />`],
    ...(role === "admin" ? [["Team", (batch) => batch.team_id, "name wide"]] : []),
    ["Model", (batch) => batch.model ?? "several", "name wide"],
    ["Done", (batch) => html`${count(doneOf(batch))}<span class="soft"> of ${count(batch.request_counts.total)}</span>`, "number"],
    ["Failed", (batch) => count(batch.request_counts.failed), "number wide"],
    ["Ready at", (batch) => (batch.ended_at ? when(batch.ended_at) : batch.estimated_completion ? `~ ${clock(batch.estimated_completion)}` : "–"), "number wide"],
    ["Cost", (batch) => usdWith(batch.usage.cost_usd, 6), "number"],
  ];
  const open = data?.data.filter((batch) => !batch.ended_at) ?? [];
  const sum = (of) => open.reduce((all, batch) => all + of(batch), 0);
  const shown = data?.data.find((batch) => batch.batch_id === query.batch);
  return html`
    ${data?.data.length > 0 && html`<p class="large">${open.length
      ? `${count(open.length)} ${open.length === 1 ? "batch runs" : "batches run"}, ${count(sum(doneOf))} of ${count(sum((batch) => batch.request_counts.total))} done`
      : "No batch runs"}</p>`}
    ${role === "admin" && html`<div class="chips" role="group" aria-label="Choose batches">
      ${STATUSES.map((each) => html`<button key=${each} class="chip" aria-pressed=${query.status === each} onClick=${() => go({ status: query.status === each ? null : each, after: null })}>${each.replace("_", " ")}</button>`)}
      ${query.team && html`<button class="chip chosen" onClick=${() => go({ team: null })}>Team: ${query.team} ×</button>`}
    </div>`}
    ${error && html`<${Problem} error=${error} again=${again} />`}
    ${data && html`<${Table} label="Batches" columns=${columns} rows=${data.data} keyOf=${(batch) => batch.batch_id}
        empty=${query.status || query.team ? "No batch fits." : html`No batches yet. POST /v1/batch, or <code>tollgate batch submit FILE --wait</code>, makes one.`} />
      <div class="bar">
        ${query.after && html`<button onClick=${() => go({ after: null })}>Newest</button>`}
        ${data.has_more && html`<button onClick=${() => go({ after: data.data.at(-1).batch_id })}>Older</button>`}
      </div>`}
    ${query.batch && data && html`<${OneBatch} key=${query.batch} api=${api} role=${role} batch=${shown} id=${query.batch} again=${again} close=${() => go({ batch: null })} />`}`;
}

const doneOf = (batch) => batch.request_counts.completed + batch.request_counts.failed;

function OneBatch({ api, role, batch: listed, id, again, close }) {
  const one = `${role === "admin" ? "/admin/batches" : "/v1/batch"}/${encodeURIComponent(id)}`;
  const alone = useData(api, listed && !(listed.ended_at && listed.request_counts.failed) ? null : one); // with its failures
  const batch = alone.data ?? listed;
  const failures = Object.entries(batch?.failures ?? {});
  const act = useAct(async (what) => {
    if (what === "cancel") {
      if (!confirm("Cancel this batch? What runs comes to its end and is kept.")) return;
      await api.call("POST", `${one}/cancel`);
      again();
      alone.again();
      return;
    }
    await api.download(`${one}/results`, `${id}.jsonl`);
  });
  const isOpen = batch && !batch.ended_at;
  return html`<${Drawer} title="Batch" close=${close}>
    ${alone.error && html`<${Problem} error=${alone.error} again=${alone.again} />`}
    ${batch && html`
      <div><p class="large">${batch.request_counts.total ? `${count(doneOf(batch))} of ${count(batch.request_counts.total)}` : isOpen ? "Its lines are being checked" : "None of its lines was run"}</p><p><${State} of=${batch.status} /> ${rateOf(batch)}</p></div>
      ${batch.request_counts.total > 0 && html`<${Meter} label="Done" used=${doneOf(batch)} limit=${batch.request_counts.total} shown=${count} isGoal=${true} />`}
      ${batch.warning && html`<p class="warn">${batch.warning}</p>`}
      <${Facts} rows=${[
        ["Batch", html`<code>${batch.batch_id}</code>`],
        ["Team", batch.team_id],
        ["Endpoint", batch.endpoint],
        ["Model", batch.model],
        ["Priority", batch.priority],
        ["Made", whole(batch.created_at)],
        [isOpen ? "Expected" : "Ended", whole(batch.ended_at ?? batch.estimated_completion)],
        ["Expires", whole(batch.expires_at)],
        ["Failed", count(batch.request_counts.failed)],
        ["Tokens", `${count(batch.usage.input_tokens)} in, ${count(batch.usage.output_tokens)} out`],
        ["Cost", usd(batch.usage.cost_usd)],
        ["Callback", batch.callback_url],
      ]} />
      ${failures.length > 0 && html`<${Table} label="Failures" columns=${[["Failed with", ([code]) => code], ["Requests", ([, items]) => count(items), "number"]]} rows=${failures} keyOf=${([code]) => code} />`}
      ${batch.errors?.length > 0 && html`<${Table} label="Errors" columns=${[["Line", (one) => count(one.line), "number"], ["Code", (one) => one.code], ["Message", (one) => one.message, "long"]]} rows=${batch.errors} keyOf=${(one) => one.code + one.message + one.line} />`}
      ${act.error && html`<${Problem} error=${act.error} dismiss=${act.forget} />`}
      <div class="bar">
        ${role === "team" && html`<button class="main" disabled=${act.isBusy} onClick=${() => act.run("results")}>Download results</button>`}
        ${isOpen && (role === "team" || api.may("operator")) && html`<button class="danger" disabled=${act.isBusy} onClick=${() => act.run("cancel")}>Cancel</button>`}
      </div>`}
  <//>`;
}

function rateOf(batch) {
  const end = batch.ended_at ? Date.parse(batch.ended_at) : Date.now();
  const minutes = (end - Date.parse(batch.created_at)) / 60_000;
  return minutes > 0 && doneOf(batch) > 0 ? `${(doneOf(batch) / minutes).toFixed(1)} a minute since it was made` : "";
}
