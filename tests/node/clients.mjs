// One client of the field for Node at a gateway: a word, the same as a stream, and a task with a tool. Arguments: the
// client, the gateway's URL, a key; prints what the client heard and how wide the tool was told to open, as JSON. Each
// is set up as docs/clients.md says. Packages are those of the folder that it runs in.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, url, apiKey] = process.argv.slice(2);
const [GPT, CLAUDE, HI, USE] = ["gpt-4o", "claude-sonnet-4-5", "Say something.", 'Use open_gate {"width": 3}'];
const baseURL = `${url}/v1`;
const widths = [];
const openGate = async ({ width }) => (widths.push(width), "It is open.");
const description = "Opens the gate.";
const parameters = { type: "object", properties: { width: { type: "number" } }, required: ["width"] };
const here = createRequire(pathToFileURL(`${process.cwd()}/x.mjs`));

async function load(module) {
  const found = here.resolve(module);
  return import(pathToFileURL(found));
}

async function joined(pieces, text = (piece) => piece) {
  let all = "";
  for await (const piece of pieces) all += text(piece) ?? "";
  return all;
}

const hi = [{ role: "user", content: HI }];

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
    return aiSdk(createOpenAICompatible({ name: "tollgate", baseURL, apiKey, includeUsage: true })(GPT));
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

const heard = await clients[name]();
process.stdout.write(JSON.stringify({ heard, widths }));
process.exit(0);
