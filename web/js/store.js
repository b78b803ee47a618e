// What is known of one conversation, and what is kept between loads of the page. No drawing, no network.

/** The messages of a conversation by `seq`, and which of several replies to one message is on show. */
export class Messages {
  #bySeq = new Map();
  #shown = new Map(); // parentId -> seq
  before = undefined; // undefined: nothing read yet; null: all read; else where older ones go on

  get size() {
    return this.#bySeq.size;
  }

  get all() {
    return [...this.#bySeq.values()].sort((a, b) => a.seq - b.seq);
  }

  get last() {
    return this.all.at(-1);
  }

  get(seq) {
    return this.#bySeq.get(seq);
  }

  /** Take a message; what only its stream told (`degraded`, a fault's words …) is kept when history comes later. */
  put(message) {
    const known = this.#bySeq.get(message.seq);
    const over = ["COMPLETED", "CANCELLED", "FAILED"].includes(known?.status);
    if (over && message.status === "STREAMING") return; // a page that was read before the end and arrived after it
    const { degraded, servedBy, problem, finishReason } = known ?? {};
    this.#bySeq.set(message.seq, { degraded, servedBy, problem, finishReason, ...message });
  }

  /** Take a page of history. Answers whether anything between the newest known and this page may be missing. */
  merge(page, isNewest) {
    const gap = isNewest && this.size > 0 && page.data.length > 0 && page.data.at(-1).seq > this.last.seq + 1;
    if (gap) {
      this.#bySeq.clear();
      this.before = undefined;
    }
    for (const message of page.data) this.put(message);
    if (!isNewest || this.before === undefined) this.before = page.nextBefore ?? null;
  }

  siblings(message) {
    if (message.role !== "assistant" || !message.parentId) return [message.seq];
    return this.all.filter((one) => one.role === "assistant" && one.parentId === message.parentId).map((one) => one.seq);
  }

  show(message) {
    this.#shown.set(message.parentId, message.seq);
  }

  /** What the reader sees, in order: each of the user's messages, then the one reply to it that is on show. */
  visible() {
    const all = this.all;
    const places = new Map(all.map((one) => [one.messageId, one.seq]));
    const chosen = new Map();
    const turns = [];
    for (const message of all) {
      if (message.role === "assistant" && message.parentId) chosen.set(message.parentId, message);
      else turns.push([message.seq, message]);
    }
    for (const [parent, newest] of chosen) {
      const shown = this.get(this.#shown.get(parent)) ?? newest;
      turns.push([(places.get(parent) ?? newest.seq) + 0.5, shown]);
    }
    return turns.sort((a, b) => a[0] - b[0]).map(([, message]) => message);
  }
}

/** The session: `{token, user, plan}`, kept until signing out. */
export const session = {
  get: () => parse(localStorage.getItem("session")),
  set: (value) => localStorage.setItem("session", JSON.stringify(value)),
  clear: () => localStorage.removeItem("session"),
};

/** Sends of this tab whose answer is not known yet, so that a reload repeats them under the same id. */
export const outbox = {
  get: (conversationId) => parse(sessionStorage.getItem(`send ${conversationId}`)),
  put: (conversationId, send) => sessionStorage.setItem(`send ${conversationId}`, JSON.stringify(send)),
  remove: (conversationId) => sessionStorage.removeItem(`send ${conversationId}`),
};

function parse(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}
