// The common calls of the official Node client. node check.mjs BASE_URL MODEL [EMBEDDING_MODEL]
// Prints one JSON object, which the test compares with what the Python client got.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

// The package lies in a cache, away from this file.
const require = createRequire(path.join(process.env.NODE_MODULES_AT, "anchor.cjs"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href.replace(/index\.js$/, "index.mjs"));

const [baseURL, model, embedding] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "no-key-configured", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model, temperature: 0 };
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false },
  },
};
const schema = { type: "object", properties: { n: { type: "integer", minimum: 1, maximum: 9 } }, required: ["n"], additionalProperties: false };
const result = {};

result.models = [];
for await (const one of client.models.list()) result.models.push(one.id);

const whole = await client.chat.completions.create({ ...greedy, messages, max_tokens: 12 });
result.chat = whole.choices[0].message.content;
result.usage = whole.usage;

let text = "";
let usage;
for await (const chunk of await client.chat.completions.create({
  ...greedy, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
result.chatStream = text;
result.streamUsage = usage;

const called = await client.chat.completions.create({
  ...greedy, messages, max_tokens: 40, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
});
const [call] = called.choices[0].message.tool_calls;
result.toolCall = { finish: called.choices[0].finish_reason, name: call.function.name, arguments: JSON.parse(call.function.arguments) };
const after = await client.chat.completions.create({
  ...greedy, max_tokens: 4,
  messages: [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" }],
});
result.afterTool = after.choices[0].finish_reason;

const runner = client.chat.completions.stream({ ...greedy, messages, max_tokens: 40, tools: [tool], tool_choice: "required", parallel_tool_calls: false });
const final = await runner.finalChatCompletion();
result.toolStream = JSON.parse(final.choices[0].message.tool_calls[0].function.arguments);

const shaped = await client.chat.completions.create({
  ...greedy, messages, max_tokens: 30, response_format: { type: "json_schema", json_schema: { name: "n", strict: true, schema } },
});
result.schema = JSON.parse(shaped.choices[0].message.content);

const plain = await client.completions.create({ ...greedy, prompt: "One, two, three,", max_tokens: 6 });
result.completion = plain.choices[0].text;
text = "";
for await (const chunk of await client.completions.create({ ...greedy, prompt: "One, two, three,", max_tokens: 6, stream: true })) {
  text += chunk.choices[0].text;
}
result.completionStream = text;

const response = await client.responses.create({ ...greedy, input: "What is the capital of France?", max_output_tokens: 12 });
result.response = response.output_text;
result.responseStatus = [response.status, response.incomplete_details?.reason, response.store];
const events = [];
text = "";
for await (const event of await client.responses.create({
  ...greedy, input: "What is the capital of France?", max_output_tokens: 12, stream: true,
})) {
  events.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
result.responseStream = text;
result.responseEvents = [...new Set(events)];
const functionTool = { type: "function", ...tool.function, strict: true };
const responseCall = await client.responses.create({
  ...greedy, input: "Weather in Rome?", tools: [functionTool], tool_choice: "required", parallel_tool_calls: false, max_output_tokens: 40,
});
const item = responseCall.output.find((one) => one.type === "function_call");
result.responseCall = { name: item.name, arguments: JSON.parse(item.arguments) };
const followed = await client.responses.create({
  ...greedy, max_output_tokens: 4,
  input: [{ role: "user", content: "Weather in Rome?" }, ...responseCall.output, { type: "function_call_output", call_id: item.call_id, output: "sunny" }],
});
result.responseFollowed = followed.output[0].type;

if (embedding) {
  const vectors = await client.embeddings.create({ model: embedding, input: ["one", "two"] });
  result.embeddings = vectors.data.map((one) => Array.from(one.embedding));
}

try {
  await client.chat.completions.create({ model, messages, temperature: 17 });
} catch (error) {
  result.refusal = { status: error.status, code: error.code, param: error.param, name: error.constructor.name };
}
try {
  await client.responses.create({ model, input: "x", previous_response_id: "resp_1" });
} catch (error) {
  result.responseRefusal = { status: error.status, code: error.code, param: error.param };
}
console.log(JSON.stringify(result));
