// The public API with one key, or with the session of a person who has signed in, whose cookie no script can read: JSON
// calls, and a chat completion as a stream of pieces.

const LONGEST_SILENCE = 40_000; // ms; the gateway sends a comment after 15 seconds
const AWAY = { error: { message: "The gateway does not answer. Is the network up?" } };

export class ApiError extends Error {
  constructor(status, body, requestId = null) {
    super(body?.error?.message ?? `The gateway answered ${status}.`);
    this.status = status;
    this.code = body?.error?.code ?? null;
    this.requestId = requestId;
  }
}

export class Api {
  // `key` is null for a session, whose `identity` is known: { role, team_id, name, person, expires_at }; that of an admin's
  // key is asked for once it works. `refused` hears of it when the gateway does not take the key, or the session has ended;
  // `learned`, when it is known who the key is; from then on `whose` names them.
  constructor(key, refused = () => {}, { identity = null, learned = () => {} } = {}) {
    this.key = key;
    this.role = key?.startsWith("tg-") ? "team" : "admin"; // no admin's key may begin like a team's
    this.own = null; // the id of the team whose key this is, once it is known
    this.identity = identity;
    this.whose = identity && whoseIs(identity);
    this.isLearning = identity !== null;
    this.refused = refused; // hears of the error and of this
    this.learned = learned;
    this.left = {}; // what the x-ratelimit-* headers of the last answer said, and when: { remaining, limit, at }
  }

  // Whether this admin has one of these roles; the role admin has all. Until it is known, the gateway decides.
  may(...roles) {
    return this.role === "admin" && (this.identity === null || ["admin", ...roles].includes(this.identity.role));
  }

  async learn() {
    if (this.isLearning) return;
    this.isLearning = true;
    try {
      const one = await this.ask();
      if (this.role === "admin") this.identity = one;
      else this.own = one.id;
      this.whose = whoseIs(one);
      this.learned();
    } catch {
      this.isLearning = false; // with the next answer
    }
  }

  // Returns who the key is: a team, or an admin.
  ask() {
    return this.get(this.role === "team" ? "/v1/team" : "/admin/me");
  }

  // The team whose admin this is, or null.
  get team() {
    return this.identity?.team_id ?? null;
  }

  async call(method, path, body = undefined, signal = undefined) {
    const answer = await this.send(method, path, body, signal);
    return answer.json();
  }

  get(path, signal = undefined) {
    return this.call("GET", path, undefined, signal);
  }

  // Hands an answer to the browser as a file.
  async download(path, name) {
    const answer = await this.send("GET", path);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // ms
  }

  // Yields text as it comes; returns { usage, model_used, requestId } at the end.
  async *chat(model, messages, user, signal) {
    const options = { model, messages, user: user || undefined, stream: true, stream_options: { include_usage: true } };
    const answer = await this.send("POST", "/v1/chat/completions", options, signal);
    const end = { requestId: answer.headers.get("x-request-id") };
    let isDone = false;
    for await (const event of events(answer.body)) {
      if (event === "[DONE]") {
        isDone = true;
        continue;
      }
      const chunk = JSON.parse(event);
      if (chunk.error) throw new ApiError(answer.status, chunk, end.requestId);
      end.model_used = chunk.model_used ?? end.model_used;
      end.usage = chunk.usage ?? end.usage;
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) yield text;
    }
    if (!isDone) throw new ApiError(answer.status, { error: { message: "The answer broke off." } }, end.requestId);
    return end;
  }

  // Calls `opened`, then yields what GET /admin/live or /v1/live tells, event by event. Throws where nothing is heard for
  // longer than the gateway is ever silent.
  async *watch(path, signal, opened) {
    const answer = await this.send("GET", path, undefined, signal);
    opened();
    for await (const event of events(answer.body, LONGEST_SILENCE)) yield JSON.parse(event);
  }

  async send(method, path, body, signal) {
    const headers = this.key === null ? {} : { authorization: `Bearer ${this.key}` };
    if (body !== undefined) headers["content-type"] = "application/json";
    const options = { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal };
    let answer;
    try {
      answer = await fetch(path, { ...options, cache: "no-store", credentials: this.key === null ? "same-origin" : "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, AWAY);
    }
    this.hear(answer.headers);
    if (answer.ok || answer.status === 403) this.learn();
    if (answer.ok) return answer;
    const error = new ApiError(answer.status, await answer.json().catch(() => null), answer.headers.get("x-request-id"));
    if (error.code === "invalid_api_key") {
      error.message = this.key === null ? "Your session has ended. Sign in again." : "This key is not known, or no longer.";
      this.refused(error, this);
    }
    throw error;
  }

  // Notes what is left of the limits a minute; refusals say it, too.
  hear(headers) {
    for (const kind of ["requests", "tokens"]) {
      const remaining = headers.get(`x-ratelimit-remaining-${kind}`);
      const limit = headers.get(`x-ratelimit-limit-${kind}`);
      if (remaining !== null) this.left[kind] = { remaining: Number(remaining), limit: Number(limit), at: Date.now() };
    }
  }
}

// What two keys have in common that show the same: the team, or the role of an admin.
export const whoseIs = (one) => JSON.stringify([one.object, one.id, one.role, one.team_id]);

// The data of each server-sent event in a stream of bytes, whatever the chunks' boundaries. `patience`: milliseconds
// without a byte after which the stream is given up.
async function* events(stream, patience = null) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunksOf(stream, patience)) {
    rest += decoder.decode(bytes, { stream: true });
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length > 0) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

async function* chunksOf(stream, patience) {
  const reader = stream.getReader();
  let isSilent = false;
  try {
    for (;;) {
      const timer = patience && setTimeout(() => ((isSilent = true), reader.cancel().catch(() => {})), patience);
      const { done, value } = await reader.read().finally(() => clearTimeout(timer));
      if (isSilent) throw new ApiError(0, AWAY);
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
