// Clients of the field for Node at a gateway: a word, the same as a stream, and a task with a tool; those that
// package.json names are asked for an answer in a schema and for a model that is not there besides. Arguments: the
// clients, with commas; the gateway's URL, a key, and two models where others than those below are there. Prints what
// each heard and how wide the tool was told to open, a line of JSON each. Each is set up as docs/clients.md says.
// Packages are those of the folder that it runs in.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [names, url, apiKey, GPT = "gpt-4o", CLAUDE = "claude-sonnet-4-5"] = process.argv.slice(2);
const [HI, USE, NONE] = ["Say something.", 'Use open_gate {"width": 3}', "no-such-model"];
const baseURL = `${url}/v1`;
let widths = [];
const openGate = async ({ width }) => (widths.push(width), "It is open.");
const description = "Opens the gate.";
const parameters = { type: "object", properties: { width: { type: "number" } }, required: ["width"] };
const here = createRequire(pathToFileURL(`${process.cwd()}/x.mjs`));

async function load(module) {
  try {
    return await import(pathToFileURL(here.resolve(module)));
  } catch (error) {
    if (error.code !== "ERR_PACKAGE_PATH_NOT_EXPORTED") throw error;
    return import(module); // it is for `import` alone
  }
}

async function joined(pieces, text = (piece) => piece) {
  let all = "";
  for await (const piece of pieces) all += text(piece) ?? "";
  return all;
}

const hi = [{ role: "user", content: HI }];
const schema = { type: "json_schema", json_schema: { name: "gate", schema: parameters } };

// What takes the arguments of OpenAI's API: `ask` gives the body of an answer, `stream` the chunks of one.
async function chats(ask, stream) {
  const say = async (more) => (await ask({ model: GPT, messages: hi, ...more })).choices[0].message;
  const plain = await say();
  const heard = await joined(await stream({ model: GPT, messages: hi }), (chunk) => chunk.choices[0]?.delta.content);
  const tools = [{ type: "function", function: { name: "open_gate", description, parameters } }];
  const messages = [{ role: "user", content: USE }];
  messages.push(await say({ messages, tools }));
  const [{ id, function: { arguments: said } }] = messages[1].tool_calls;
  messages.push({ role: "tool", tool_call_id: id, content: await openGate(JSON.parse(said)) });
  const used = await say({ messages, tools });
  const formed = await say({ response_format: schema });
  return [plain.content, heard, used.content, formed.content, await refusal(say({ model: NONE }))];
}

async function refusal(asked) {
  return asked.then(() => "", (error) => `${error.status ?? ""} ${error.message}`);
}

// What a stream of the API's is to a client that has `fetch` alone.
async function* events(body) {
  let rest = "";
  for await (const text of body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function checked(answer) {
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

async function aiSdk(model) {
  const { generateText, streamText, tool, stepCountIs } = await load("ai");
  const { z } = await load("zod");
  const tools = { open_gate: tool({ description, inputSchema: z.object({ width: z.number() }), execute: openGate }) };
  const plain = await generateText({ model, prompt: HI });
  const streamed = await joined(streamText({ model, prompt: HI }).textStream);
  const used = await generateText({ model, prompt: USE, tools, stopWhen: stepCountIs(3) });
  return [plain.text, streamed, used.text];
}

async function langchain(model) {
  const { tool } = await load("@langchain/core/tools");
  const { HumanMessage } = await load("@langchain/core/messages");
  const { z } = await load("zod");
  const gate = tool(openGate, { name: "open_gate", description, schema: z.object({ width: z.number() }) });
  const plain = await model.invoke(HI);
  const streamed = await joined(await model.stream(HI), (chunk) => chunk.text);
  const messages = [new HumanMessage(USE)];
  const armed = model.bindTools([gate]);
  messages.push(await armed.invoke(messages));
  for (const call of messages[1].tool_calls) messages.push(await gate.invoke({ ...call, type: "tool_call" }));
  return [plain.text, streamed, (await armed.invoke(messages)).text];
}

async function agents(kind) {
  const sdk = await load("@openai/agents");
  const { OpenAI } = await load("openai");
  const { z } = await load("zod");
  sdk.setTracingDisabled(true);
  const model = new sdk[kind](new OpenAI({ baseURL, apiKey }), GPT);
  const runner = new sdk.Runner({ tracingDisabled: true });
  const plain = new sdk.Agent({ name: "keeper", model });
  const gate = sdk.tool({ name: "open_gate", description, parameters: z.object({ width: z.number() }), execute: openGate });
  const armed = new sdk.Agent({ name: "keeper", model, tools: [gate] });
  const streamed = await runner.run(plain, HI, { stream: true });
  const heard = await joined(streamed.toTextStream());
  return [(await runner.run(plain, HI)).finalOutput, heard, (await runner.run(armed, USE)).finalOutput];
}

const clients = {
  async openai() {
    const { OpenAI } = await load("openai");
    const chats = new OpenAI({ baseURL, apiKey }).chat.completions;
    const plain = await chats.create({ model: GPT, messages: hi });
    const streamed = await chats.create({ model: GPT, messages: hi, stream: true });
    const gate = { name: "open_gate", description, parameters, function: openGate, parse: JSON.parse };
    const used = chats.runTools({ model: GPT, messages: [{ role: "user", content: USE }], tools: [{ type: "function", function: gate }] });
    const text = (chunk) => chunk.choices[0]?.delta.content;
    return [plain.choices[0].message.content, await joined(streamed, text), await used.finalContent()];
  },
  async openai_responses() {
    const { OpenAI } = await load("openai");
    const { responses } = new OpenAI({ baseURL, apiKey });
    const tools = [{ type: "function", name: "open_gate", description, parameters, strict: false }];
    const plain = await responses.create({ model: GPT, input: HI });
    const streamed = await responses.stream({ model: GPT, input: HI }).finalResponse();
    const asked = await responses.create({ model: GPT, input: USE, tools });
    const [{ call_id, arguments: said }] = asked.output;
    const input = [{ type: "function_call_output", call_id, output: await openGate(JSON.parse(said)) }];
    const used = await responses.create({ model: GPT, input, tools, previous_response_id: asked.id });
    return [plain.output_text, streamed.output[0].content[0].text, used.output_text];
  },
  async anthropic() {
    const { Anthropic } = await load("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey });
    const asked = { model: CLAUDE, max_tokens: 99 };
    const plain = await client.messages.create({ ...asked, messages: hi });
    const streamed = await client.messages.stream({ ...asked, messages: hi }).finalText();
    const gate = { name: "open_gate", description, input_schema: parameters, run: openGate, parse: (input) => input };
    const messages = [{ role: "user", content: USE }];
    const used = await client.beta.messages.toolRunner({ ...asked, messages, tools: [gate] });
    return [plain.content[0].text, streamed, used.content[0].text];
  },
  async ai_compatible() {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return aiSdk(createOpenAICompatible({ name: "tollgate", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })(GPT));
  },
  async ai_openai_responses() {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return aiSdk(createOpenAI({ baseURL, apiKey })(GPT));
  },
  async ai_openai_chat() {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return aiSdk(createOpenAI({ baseURL, apiKey }).chat(GPT));
  },
  async ai_anthropic() {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return aiSdk(createAnthropic({ baseURL, apiKey })(CLAUDE));
  },
  async langchain_openai() {
    const { ChatOpenAI } = await load("@langchain/openai");
    return langchain(new ChatOpenAI({ model: GPT, apiKey, configuration: { baseURL } }));
  },
  async langchain_anthropic() {
    const { ChatAnthropic } = await load("@langchain/anthropic");
    return langchain(new ChatAnthropic({ model: CLAUDE, apiKey, anthropicApiUrl: url }));
  },
  async anthropic_by_hand() {
    const { Anthropic } = await load("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
    const say = (more) => client.messages.create({ model: CLAUDE, max_tokens: 99, messages: hi, ...more });
    const plain = await say();
    const streamed = await client.messages.stream({ model: CLAUDE, max_tokens: 99, messages: hi }).finalText();
    const tools = [{ name: "open_gate", description, input_schema: parameters }];
    const asked = await say({ messages: [{ role: "user", content: USE }], tools });
    const { id: tool_use_id, input } = asked.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id, content: await openGate(input) };
    const turns = [{ role: "assistant", content: asked.content }, { role: "user", content: [result] }];
    const used = await say({ messages: [{ role: "user", content: USE }, ...turns], tools });
    const formed = await say({ output_config: { format: { type: "json_schema", schema: { ...parameters, additionalProperties: false } } } });
    const texts = [plain.content[0].text, streamed, used.content[0].text, formed.content[0].text];
    return [...texts, await refusal(say({ model: NONE }))];
  },
  async fetch() {
    const headers = { authorization: `Bearer ${apiKey}`, "content-type": "application/json" };
    const post = async (body) => checked(await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) }));
    return chats(async (body) => (await post(body)).json(), async (body) => events((await post({ ...body, stream: true })).body));
  },
  async openai_edge() {
    const { Configuration, OpenAIApi } = await load("openai-edge");
    const api = new OpenAIApi(new Configuration({ apiKey, basePath: baseURL }));
    const post = async (body) => checked(await api.createChatCompletion(body));
    return chats(async (body) => (await post(body)).json(), async (body) => events((await post({ ...body, stream: true })).body));
  },
  async openai_fetch() {
    const { OpenAIClient } = await load("openai-fetch");
    const client = new OpenAIClient({ apiKey, baseUrl: baseURL });
    return chats((body) => client.createChatCompletion(body), (body) => client.streamChatCompletion(body));
  },
  async xsai() {
    const { generateText } = await load("@xsai/generate-text");
    const { streamText } = await load("@xsai/stream-text");
    const { rawTool } = await load("@xsai/tool");
    const asked = { baseURL, apiKey, model: GPT, messages: hi };
    const tools = [rawTool({ name: "open_gate", description, parameters, execute: openGate })];
    const plain = await generateText(asked);
    const streamed = await joined(streamText(asked).textStream);
    const used = await generateText({ ...asked, messages: [{ role: "user", content: USE }], tools, maxSteps: 3 });
    const formed = await generateText({ ...asked, response_format: schema });
    return [plain.text, streamed, used.text, formed.text, await refusal(generateText({ ...asked, model: NONE }))];
  },
  agents_responses: () => agents("OpenAIResponsesModel"),
  agents_chat: () => agents("OpenAIChatCompletionsModel"),
  async mastra() {
    const { Agent } = await load("@mastra/core/agent");
    const { createTool } = await load("@mastra/core/tools");
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const { z } = await load("zod");
    const model = createOpenAICompatible({ name: "tollgate", baseURL, apiKey, includeUsage: true })(GPT);
    const execute = async (input) => ({ said: await openGate(input.context ?? input) });
    const gate = createTool({ id: "open_gate", description, inputSchema: z.object({ width: z.number() }), execute });
    const plain = new Agent({ id: "keeper", name: "keeper", instructions: "You keep a gate.", model });
    const armed = new Agent({ id: "opener", name: "opener", instructions: "You keep a gate.", model, tools: { open_gate: gate } });
    const streamed = await plain.stream(HI);
    return [(await plain.generate(HI)).text, await joined(streamed.textStream), (await armed.generate(USE)).text];
  },
  async genkit() {
    const { genkit, z } = await load("genkit");
    const { openAICompatible } = await load("@genkit-ai/compat-oai");
    const ai = genkit({ plugins: [openAICompatible({ name: "tollgate", apiKey, baseURL })] });
    const gate = ai.defineTool({ name: "open_gate", description, inputSchema: z.object({ width: z.number() }) }, openGate);
    const model = `tollgate/${GPT}`;
    const streamed = ai.generateStream({ model, prompt: HI });
    const heard = await joined(streamed.stream, (chunk) => chunk.text);
    return [(await ai.generate({ model, prompt: HI })).text, heard, (await ai.generate({ model, prompt: USE, tools: [gate] })).text];
  },
  async llamaindex() {
    const { openai } = await load("@llamaindex/openai");
    const llm = openai({ model: GPT, apiKey, baseURL });
    const plain = await llm.chat({ messages: hi });
    return [plain.message.content, await joined(await llm.chat({ messages: hi, stream: true }), (chunk) => chunk.delta)];
  },
};

for (const name of names.split(",")) {
  widths = [];
  const heard = await clients[name]();
  process.stdout.write(`${JSON.stringify({ heard, widths })}\n`);
}
process.exit(0);
