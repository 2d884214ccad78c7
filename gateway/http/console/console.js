// The key, from the form or the tab's session storage, decides which view is shown.

import { Api } from "./api.js";
import { showAdmin } from "./admin.js";
import { showTeam } from "./team.js";

const MEMORY = "tollgate-key";
const at = (id) => document.getElementById(id);

let refresh = null; // fills the current view anew

async function enter(key) {
  const api = new Api(key);
  const team = await api.get("/v1/team").catch((error) => {
    if (error.status === 403 && error.code !== "team_suspended") return null; // a key, but no team's
    throw error;
  });
  if (team === null) await api.get("/admin/teams?limit=1");
  sessionStorage.setItem(MEMORY, key);
  at("who").textContent = team === null ? "Admin" : `${team.name} (${team.id})`;
  refresh = await (team === null ? showAdmin : showTeam)(api, at("view"), guarded, behind);
  at("sign-in").hidden = true;
  for (const id of ["view", "leave", "refresh"]) at(id).hidden = false;
}

function leave() {
  sessionStorage.removeItem(MEMORY);
  location.reload();
}

// Runs what the reader asks for, and says what went wrong, if something did, in the place of what went wrong before.
function guarded(action) {
  at("notice").hidden = true;
  return behind(action);
}

// Runs what happens by itself: a notice stays until its reader dismisses it or asks for something else.
async function behind(action) {
  try {
    return await action();
  } catch (error) {
    at("notice-words").textContent = error.status === 401 ? "This key is not known, or no longer." : error.message;
    at("notice").hidden = false;
    return undefined;
  }
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded(() => enter(at("key").value.trim()));
});
at("dismiss").addEventListener("click", () => (at("notice").hidden = true));
at("leave").addEventListener("click", leave);
at("refresh").addEventListener("click", () => guarded(() => refresh()));

const remembered = sessionStorage.getItem(MEMORY);
if (remembered !== null) guarded(() => enter(remembered));
