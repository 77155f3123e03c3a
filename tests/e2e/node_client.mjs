// A client in another language that knows TLS, HTTP/1.1 and SSE and nothing of this project's code.
// node node_client.mjs PORT OUTPUT_DIR BODY_FILE NONCE_HEX INFERENCE_NONCE_HEX
// It attests its connection, posts the body, checks the grammar of the event stream, and saves what it saw.
import { writeFileSync, readFileSync } from "node:fs";
import tls from "node:tls";

const [port, directory, bodyFile, nonceHex, inferenceNonceHex] = process.argv.slice(2);
const nonce = Buffer.from(nonceHex, "hex");
const socket = tls.connect({
  host: "127.0.0.1", port: Number(port), rejectUnauthorized: false, minVersion: "TLSv1.3", ALPNProtocols: ["http/1.1"],
});
socket.on("error", (error) => fail(error.message));
let received = Buffer.alloc(0);
let wake = () => {};
socket.on("data", (data) => { received = Buffer.concat([received, data]); wake(); });
socket.on("end", () => fail("the server closed the connection"));

function fail(why) { console.error(why); process.exit(1); }
function need(condition, why) { if (!condition) fail(why); }
async function until(ready) {
  for (;;) {
    const value = ready();
    if (value !== undefined) return value;
    await new Promise((resolve) => { wake = resolve; });
  }
}
function take(count) { const data = received.subarray(0, count); received = received.subarray(count); return data; }

async function readHead() {
  const end = await until(() => { const at = received.indexOf("\r\n\r\n"); return at < 0 ? undefined : at; });
  const [status, ...lines] = take(end + 4).toString("latin1").trimEnd().split("\r\n");
  const headers = Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf(":")).toLowerCase(), line.slice(line.indexOf(":") + 2)]));
  return { status: Number(status.split(" ")[1]), headers };
}
async function readBody(headers) {
  if (headers["content-length"] !== undefined) {
    const length = Number(headers["content-length"]);
    await until(() => (received.length >= length ? true : undefined));
    return take(length);
  }
  need(headers["transfer-encoding"] === "chunked", "neither length nor chunks");
  const parts = [];
  for (;;) {
    const end = await until(() => { const at = received.indexOf("\r\n"); return at < 0 ? undefined : at; });
    const size = parseInt(take(end + 2).toString("latin1"), 16);
    await until(() => (received.length >= size + 2 ? true : undefined));
    parts.push(take(size));
    need(take(2).toString("latin1") === "\r\n", "a chunk does not end");
    if (size === 0) return Buffer.concat(parts);
  }
}
function post(path, type, body, more = "") {
  socket.write(`POST ${path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: ${type}\r\ncontent-length: ${body.length}\r\n${more}\r\n`);
  socket.write(body);
}

// The grammar every SSE client relies on: LF only, blocks of `data:` lines or comments, [DONE] last and once.
function checkStream(text) {
  need(!text.includes("\r"), "CR in the stream");
  need(text.endsWith("\n\n"), "the stream ends inside a block");
  const blocks = text.slice(0, -2).split("\n\n");
  for (const block of blocks) {
    for (const line of block.split("\n")) need(/^(data: |: )/.test(line), `not SSE: ${line.slice(0, 8)}`);
  }
  const data = blocks.filter((block) => block.startsWith("data: ")).map((block) => block.slice(6));
  need(data.at(-1) === "[DONE]" && blocks.at(-1) === "data: [DONE]", "[DONE] is not last");
  const frames = data.slice(0, -1).map((item) => JSON.parse(item));
  return frames.map((frame) => frame.choices[0]?.delta.content ?? "").join("");
}

await new Promise((resolve) => socket.once("secureConnect", resolve));
const spki = socket.getPeerX509Certificate().publicKey.export({ type: "spki", format: "der" });
const exported = socket.exportKeyingMaterial(32, "Attestation", nonce);
// dCBOR of {"nonce": bstr .size 32}: a map of one, a text of five, a byte string of 32
const question = Buffer.concat([Buffer.from([0xa1, 0x65]), Buffer.from("nonce"), Buffer.from([0x58, 0x20]), nonce]);
post("/.well-known/attestation", "application/cbor", question);
const attestation = await readHead();
need(attestation.status === 200 && attestation.headers["content-type"] === "application/cbor", "no attestation");
const bundle = await readBody(attestation.headers);

const body = readFileSync(bodyFile);
const sentAt = Date.now() / 1000;
post("/v1/chat/completions", "application/json", body, `x-inference-nonce: ${inferenceNonceHex}\r\n`);
const head = await readHead();
const response = await readBody(head.headers);
const receivedAt = Date.now() / 1000;
const streamed = head.headers["content-type"] === "text/event-stream";
const text = streamed ? checkStream(response.toString("utf8")) : JSON.parse(response).choices[0].message.content;
const comment = response.toString("latin1").split("\n\n").find((block) => block.startsWith(": receipt "));
const receipt = Buffer.from(streamed ? comment.slice(10) : head.headers["x-execution-receipt"], "base64url");

const save = (name, content) => writeFileSync(`${directory}/${name}`, content, { mode: 0o600 });
save("request", body);
save("response", response);
save("receipt", receipt);
save("attestation", bundle);
save("answer.json", JSON.stringify({
  version: 1,
  request: { method: "POST", route: "/v1/chat/completions", nonce: inferenceNonceHex, "sent-at": sentAt },
  response: { status: head.status, "media-type": head.headers["content-type"], "receipt-id": head.headers["x-receipt-id"], "received-at": receivedAt },
  attestation: { nonce: nonceHex, spki: spki.toString("hex"), exported: exported.toString("hex"), suite: socket.getCipher().standardName, "verified-at": receivedAt },
  "policy-digest": process.env.POLICY_DIGEST,
}));
console.log(text);
socket.removeAllListeners("end");
socket.end();
