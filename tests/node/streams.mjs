// Callers of one HTTP/2 connection who stream at once: some leave after their first token, some read slowly. Arguments:
// a URL, a key, and JSON with how many (callers, leaving, slow; tokens of each) and the address that each asks for (wanted). Prints what
// each saw, a line of JSON each: status, whether it was whole, and when its first and last bytes came (milliseconds).

import http2 from "node:http2";

const [url, key, asked] = process.argv.slice(2);
const { callers, leaving, slow, tokens, wanted } = JSON.parse(asked);
const session = http2.connect(url, { rejectUnauthorized: false });

function call(number) {
  return new Promise((tell) => {
    const began = performance.now();
    const seen = { number, status: 0, whole: false, first: null, last: null, error: null, kind: "plain" };
    if (number < leaving) seen.kind = "leaving";
    else if (number < leaving + slow) seen.kind = "slow";
    const headers = { ":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json" };
    headers["authorization"] = `Bearer ${key}`;
    headers["x-client-request-id"] = `call-${number}`;
    if (wanted) headers["x-gateway-destination-endpoint"] = wanted[number % wanted.length];
    const request = session.request(headers);
    const messages = [{ role: "user", content: `Tell me of river ${number}.` }];
    request.end(JSON.stringify({ model: "tiny", stream: true, max_tokens: tokens, messages }));
    let text = "";
    request.setEncoding("utf8");
    request.on("response", (found) => (seen.status = found[":status"]));
    request.on("data", (part) => {
      text += part;
      seen.last = performance.now() - began;
      if (!text.includes('"content"')) return;
      seen.first ??= seen.last;
      if (seen.kind === "leaving") request.close(http2.constants.NGHTTP2_CANCEL);
      if (seen.kind === "slow" && !request.isPaused()) {
        request.pause();
        setTimeout(() => request.resume(), 150);
      }
    });
    request.on("error", (error) => (seen.error = `${error}`));
    request.on("close", () => {
      seen.whole = text.endsWith("data: [DONE]\n\n");
      if (seen.status !== 200) seen.error ??= text.slice(0, 300);
      tell(seen);
    });
  });
}

const seen = await Promise.all(Array.from({ length: callers }, (_, number) => call(number)));
for (const each of seen) console.log(JSON.stringify(each));
session.destroy();
