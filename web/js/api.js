// The service's HTTP API: JSON calls, and replies that survive drops.
import { eventsOf } from "./sse.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 8000;
const GIVE_UP_AFTER_MS = 10 * 60 * 1000; // the resume window

/** A refusal: `code`, `message`, `status`, `retryAfter` in seconds (or null), `generationId`. */
export class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `The service answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? "unknown";
    this.generationId = error?.generationId;
    this.retryAfter = retryAfter;
  }
}

export class Api {
  constructor(base, token) {
    this.base = base;
    this.token = token;
  }

  async #fetch(method, path, { body, headers, signal } = {}) {
    const response = await fetch(this.base + path, {
      method,
      signal,
      headers: {
        Authorization: `Bearer ${this.token}`,
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.ok) return response;
    const answer = await response.json().catch(() => ({}));
    const wait = Number(response.headers.get("Retry-After"));
    throw new Refusal(response.status, answer.error, wait > 0 ? wait : null);
  }

  async json(method, path, body) {
    const response = await this.#fetch(method, path, { body });
    return response.status === 204 ? null : response.json();
  }

  /** Send (or repeat) a message; yields its events to the last one, over any number of connections. */
  send(conversationId, body, signal) {
    return this.#reply("POST", `/v1/conversations/${conversationId}/messages`, body, signal);
  }

  regenerate(conversationId, seq, body, signal) {
    return this.#reply("POST", `/v1/conversations/${conversationId}/messages/${seq}/regenerate`, body, signal);
  }

  follow(generationId, signal) {
    return this.#reply("GET", `/v1/generations/${generationId}/stream`, undefined, signal, generationId);
  }

  async *#reply(method, path, body, signal, generationId = null) {
    let last = 0;
    let pause = FIRST_PAUSE_MS;
    let quietSince = Date.now();
    for (;;) {
      try {
        const resuming = generationId !== null;
        const response = resuming
          ? await this.#fetch("GET", `/v1/generations/${generationId}/stream`, {
              signal,
              headers: last ? { "Last-Event-ID": String(last) } : {},
            })
          : await this.#fetch(method, path, { body, signal });
        generationId = response.headers.get("X-Generation-Id") ?? generationId;
        for await (const event of eventsOf(response)) {
          if (event.id !== null && event.id <= last) continue;
          if (event.id !== null) last = event.id;
          pause = FIRST_PAUSE_MS;
          quietSince = Date.now();
          yield { ...event, generationId };
          if (event.kind === "done" || event.kind === "error") return;
        }
      } catch (error) {
        if (signal?.aborted) return;
        const passing = error instanceof TypeError || (error instanceof Refusal && error.status === 503);
        if (!passing || Date.now() - quietSince > GIVE_UP_AFTER_MS) throw error;
        yield { kind: "reconnecting", id: null, data: {}, generationId };
      }
      if (signal?.aborted) return;
      await untilWorthTrying(pause * (0.5 + Math.random()), signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }
}

/** Waits, or until the network is back, whichever is first. */
function untilWorthTrying(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(end, ms);
    function end() {
      clearTimeout(timer);
      removeEventListener("online", end);
      signal?.removeEventListener("abort", end);
      resolve();
    }
    addEventListener("online", end);
    signal?.addEventListener("abort", end);
  });
}
