// A reader of server-sent events over fetch, since EventSource cannot send an Authorization header.

/** Incremental parser: feed bytes in any pieces, get whole events. Comments are dropped. */
export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #event = { id: null, kind: "message", data: [] };

  /** @param {Uint8Array} bytes @returns {{id: number|null, kind: string, data: any}[]} */
  feed(bytes) {
    this.#rest += this.#decoder.decode(bytes, { stream: true });
    const events = [];
    // A lone CR at the very end may be the first half of CRLF: it waits.
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      const event = this.#line(line);
      if (event) events.push(event);
    }
    return events;
  }

  #line(line) {
    if (line === "") {
      const { id, kind, data } = this.#event;
      this.#event = { id: null, kind: "message", data: [] };
      return data.length ? { id, kind, data: JSON.parse(data.join("\n")) } : null;
    }
    if (line.startsWith(":")) return null;
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "id") this.#event.id = Number(value);
    else if (name === "event") this.#event.kind = value;
    else if (name === "data") this.#event.data.push(value);
    return null;
  }
}

/** Events of a response's body, as they arrive. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
