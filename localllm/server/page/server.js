// The server that the page came from: its models, and replies as they are written.

class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    Object.assign(this, {status, code});
  }
}

const server = {
  get key() { return stored("key") ?? ""; },
  set key(value) { store("key", value || null); },
  get toolsKey() { return stored("toolsKey") ?? ""; },
  set toolsKey(value) { store("toolsKey", value || null); },

  // `path` is relative to the page.  A proxy may serve the page at another path, with or without a slash at the end.
  async fetch(path, body, signal, method = body ? "POST" : "GET") {
    const headers = this.key ? {Authorization: `Bearer ${this.key}`} : {};
    if (path.startsWith("page/") && this.toolsKey) headers["X-Page-Key"] = this.toolsKey;
    if (body) headers["Content-Type"] = "application/json";
    let reply;
    try {
      const folder = location.pathname.endsWith("/") ? "" : `${location.pathname}/`;
      reply = await fetch(folder + path, {method, headers, signal, ...(body && {body: JSON.stringify(body)})});
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer. Is it still running?");
    }
    if (reply.ok) return reply;
    const {error} = await reply.json().catch(() => ({}));
    throw new ServerError(error?.message ?? `The server answered with status ${reply.status}.`, reply.status, error?.code);
  },

  async json(path, body, signal) { return (await this.fetch(path, body, signal)).json(); },

  // The lines of a streamed answer.
  async *lines(path, body, signal) {
    const reply = await this.fetch(path, body, signal);
    const chunks = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const {value, done} = await chunks.read();
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      yield* lines;
    }
  },

  // The chunks of a reply.  An end without the server's word for it is an error.
  async *chat(body, signal) {
    try {
      for await (const line of this.lines("v1/chat/completions", {...body, stream: true}, signal)) {
        if (line === "data: [DONE]") return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new ServerError(event.error.message, 0, event.error.code);
        yield event;
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ServerError) throw error;
    }
    throw new ServerError("The connection to the server ended before the reply did.");
  },
};
