// What a product team does with OpenAI's own package for Node, against a running gateway; prints what it saw as JSON.
// Arguments: the gateway's URL, a key, a model, and a model whose streams break.

import OpenAI from "openai";

const [url, apiKey, model, breaking] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const seen = {};

const plain = await client.chat.completions.create({ model, messages, seed: 1 }).withResponse();
seen.text = plain.data.choices[0].message.content;
seen.cost = plain.data.usage.cost_usd;
seen.requestId = plain.request_id;

const stream = await client.chat.completions.create({
  model, messages, seed: 1, stream: true, stream_options: { include_usage: true },
});
const chunks = [];
for await (const chunk of stream) chunks.push(chunk);
seen.streamed = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
seen.usage = chunks.at(-1).usage.total_tokens - plain.data.usage.total_tokens;

const helper = client.chat.completions.stream({ model, messages, seed: 1 });
seen.helped = await helper.finalContent();

const asked = { model, input: "Say something." };
const response = await client.responses.create(asked);
const events = client.responses.stream(asked);
const kinds = [];
for await (const event of events) kinds.push(event.type);
const built = await events.finalResponse();
seen.responses = [response.output_text, built.output[0].content[0].text, built.status, kinds[0], kinds.at(-1)];

const behind = await client.responses.create({ ...asked, background: true });
const heard = [];
for await (const event of await client.responses.retrieve(behind.id, { stream: true, starting_after: 1 })) heard.push(event);
const read = await client.responses.retrieve(behind.id);
seen.behind = [behind.status, heard[0].sequence_number, heard.at(-1).type, read.status, read.output_text];

const left = await client.chat.completions.create({ model, messages, stream: true });
for await (const chunk of left) {
  left.controller.abort();
  seen.leftAfter = chunk.object;
  break;
}

seen.errors = {};
const fails = async (name, act) => {
  try {
    await act();
    seen.errors[name] = null;
  } catch (error) {
    seen.errors[name] = [error.constructor.name, error.status ?? null, error.code ?? null];
  }
};
await fails("broken", async () => {
  for await (const _ of await client.chat.completions.create({ model: breaking, messages, stream: true }));
});
await fails("unknown", () => client.chat.completions.create({ model: "no-such-model", messages }));
await fails("key", () => new OpenAI({ baseURL: `${url}/v1`, apiKey: "tg-wrong", maxRetries: 0 }).models.list());

seen.vector = (await client.embeddings.create({ model, input: "one" })).data[0].embedding.length;
seen.models = (await client.models.list()).data.map((one) => one.id);
process.stdout.write(JSON.stringify(seen));
