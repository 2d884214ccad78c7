// Calls are made by a team's key. A team's reader has one; an admin types one in, for as long as the page is open.

import { Api } from "./api.js";
import { html, useState } from "./ui.js";

let typed = null; // the Api of an admin's typed key

// Returns [the Api to call with or null, the field to type a key in or null].
export function useTeamKey(api) {
  const [own, setOwn] = useState(typed);
  if (api.role === "team") return [api, null];
  if (own !== null) return [own, null];
  const submit = (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("team-key").trim();
    if (!key) return;
    typed = new Api(key, () => setOwn((typed = null)));
    setOwn(typed);
  };
  const field = html`<form class="row" onSubmit=${submit}>
    <label>A team’s key to call with<input name="team-key" type="password" autocomplete="off" required placeholder="tg-…" /></label>
    <button class="main">Use it</button>
    <p class="soft">What is asked here is that team’s, and charged to it. The key is forgotten with this page.</p>
  </form>`;
  return [null, field];
}
