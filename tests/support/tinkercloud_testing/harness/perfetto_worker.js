// Runs the web worker in which Perfetto's page opens traces: bytes from stdin are the messages of the page, and answers
// go to stdout. The argument is the worker's script; the WebAssembly module that it loads is in the same folder.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const script = process.argv[2];

class XMLHttpRequest {
  open(_method, url) {
    this.file = path.join(path.dirname(script), path.basename(url));
  }

  send() {
    this.response = fs.readFileSync(this.file);
  }
}

const log = console.error;
const page = { postMessage: (answer) => process.stdout.write(answer) };
const worker = {
  console: { error: log, info: log, log, warn: log },
  location: { href: "http://127.0.0.1/" + path.basename(script) },
  performance,
  setTimeout,
  TextDecoder,
  Uint8Array,
  URL,
  WorkerGlobalScope: class {},
  XMLHttpRequest,
};
worker.self = worker;

// Node would print the line of an error, and the script is one line.
process.on("uncaughtException", (error) => {
  log(error.stack);
  process.exit(1);
});
vm.runInContext(fs.readFileSync(script, "utf8"), vm.createContext(worker));
worker.onmessage({ data: page });
setImmediate(() => process.stdin.on("data", (data) => page.onmessage({ data })));
