// Runs Perfetto's own trace processor (WebAssembly, as its web page loads it) on bytes of its protocol.
//
//   node perfetto_reader.js DIRECTORY REQUESTS ANSWERS
//
// DIRECTORY has engine_bundle.js and trace_processor*.wasm. REQUESTS is a TraceProcessorRpcStream; the answers, one
// stream after the other, are written to ANSWERS.
"use strict";
const fs = require("fs");
const path = require("path");

const [directory, requests, answers] = process.argv.slice(2);
process.on("uncaughtException", (error) => {
  // the line of the source is the whole bundle
  console.error(String(error.stack).split("\n").filter((line) => line.length < 300).join("\n"));
  process.exit(1);
});
const worker = { location: { href: "https://localhost/engine_bundle.js" } };
const around = {
  self: worker,
  WorkerGlobalScope: function () {},
  importScripts() {},
  console: { log() {}, warn() {}, error: console.error },
  // the bundle refuses Node.js, and loads the module synchronously as in a worker
  process: undefined,
  XMLHttpRequest: class {
    open(_, name) { this.name = path.basename(String(name)); }
    send() {
      const data = fs.readFileSync(path.join(directory, this.name));
      this.status = 200;
      this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
    }
  },
};
const bundle = fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8");
new Function(...Object.keys(around), bundle)(...Object.values(around));

const replies = [];
const port = { postMessage: (bytes) => replies.push(Buffer.from(bytes)) };
worker.onmessage({ data: port });
// the module has announced itself in a promise, whose actions run before this
setImmediate(() => {
  port.onmessage({ data: new Uint8Array(fs.readFileSync(requests)) });
  fs.writeFileSync(answers, Buffer.concat(replies));
  process.exit(0);
});
