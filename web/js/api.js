// The service's HTTP API: JSON calls, and replies that survive drops.
import { eventsOf } from "./sse.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 8000;
const GIVE_UP_AFTER_MS = 10 * 60 * 1000; // the resume window
const ANSWER_WITHIN_MS = 30_000;

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

/** Whether the same request may succeed later by itself: the network, or a store that is away. */
export function passing(error) {
  return error instanceof TypeError || (error instanceof Refusal && [502, 503, 504].includes(error.status));
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

  /** One call; where `repeatable`, made again a few times while the network or a store is away. */
  async json(method, path, body, repeatable = method !== "POST") {
    for (let tries = 1; ; tries++) {
      try {
        const response = await this.#fetch(method, path, { body, signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
        return response.status === 204 ? null : await response.json();
      } catch (error) {
        if (error.name === "TimeoutError") throw new Error("The service does not answer. Try again.");
        if (!passing(error)) throw error;
        if (!repeatable || tries === 4) {
          throw error instanceof Refusal ? error : new Error("The service cannot be reached. Check the connection.");
        }
        await untilWorthTrying(Math.max(tries * 500, (error.retryAfter ?? 0) * 1000));
      }
    }
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

  /**
   * The request is repeated until its answer says which generation it made (the body carries clientMessageId, so a
   * repeated one attaches to the same); from then on that generation is followed from the last event seen.
   */
  async *#reply(method, path, body, signal, generationId = null) {
    let last = 0;
    let firstPause = FIRST_PAUSE_MS;
    let pause = firstPause;
    let quietSince = Date.now();
    for (;;) {
      let wait = 0;
      try {
        const request = generationId === null ? { body, signal } : { signal, headers: resumeAfter(last) };
        const response =
          generationId === null
            ? await this.#fetch(method, path, request)
            : await this.#fetch("GET", `/v1/generations/${generationId}/stream`, request);
        generationId = response.headers.get("X-Generation-Id") ?? generationId;
        yield { kind: "connected", id: null, data: {}, generationId };
        for await (const event of eventsOf(response, { onRetry: (ms) => (firstPause = Math.min(ms, FIRST_PAUSE_MS)) })) {
          if (event.id !== null && event.id <= last) continue;
          if (event.id !== null) last = event.id;
          pause = firstPause;
          quietSince = Date.now();
          yield { ...event, generationId };
          if (event.kind === "done" || event.kind === "error") return;
        }
      } catch (error) {
        if (signal?.aborted) return;
        if (!passing(error) || Date.now() - quietSince > GIVE_UP_AFTER_MS) throw error;
        wait = (error.retryAfter ?? 0) * 1000;
        yield { kind: "reconnecting", id: null, data: { offline: !navigator.onLine }, generationId };
      }
      if (signal?.aborted) return;
      await untilWorthTrying(Math.max(wait, pause * (0.5 + Math.random())), signal);
      if (signal?.aborted) return;
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }
}

function resumeAfter(last) {
  return last ? { "Last-Event-ID": String(last) } : {};
}

/** Waits, or until the network is back or the page is looked at again, whichever is first. */
function untilWorthTrying(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(end, ms);
    function looked() {
      if (document.visibilityState === "visible") end();
    }
    function end() {
      clearTimeout(timer);
      removeEventListener("online", end);
      document.removeEventListener("visibilitychange", looked);
      signal?.removeEventListener("abort", end);
      resolve();
    }
    addEventListener("online", end);
    document.addEventListener("visibilitychange", looked);
    signal?.addEventListener("abort", end);
  });
}
