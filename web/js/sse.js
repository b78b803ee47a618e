// A reader of server-sent events over fetch, since EventSource cannot send an Authorization header.

/** The service sends at least a comment every 10 s; a connection silent for longer than this is dead. */
export const SILENCE_MS = 25_000;

/** Incremental parser: feed bytes in any pieces, get whole events. `retry` (ms) is what the server last asked for. */
export class EventParser {
  retry = null;
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
    if (name === "id" && /^\d+$/.test(value)) this.#event.id = Number(value);
    else if (name === "event") this.#event.kind = value;
    else if (name === "data") this.#event.data.push(value);
    else if (name === "retry" && /^\d+$/.test(value)) this.retry = Number(value);
    return null;
  }
}

/** Events of a response's body, as they arrive. Throws TypeError when it breaks or falls silent. */
export async function* eventsOf(response, { silenceMs = SILENCE_MS, onRetry } = {}) {
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await within(silenceMs, reader.read());
      if (done) return;
      const events = parser.feed(value);
      if (parser.retry !== null) onRetry?.(parser.retry);
      yield* events;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function within(ms, promise) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TypeError("The connection fell silent.")), ms);
  });
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}
