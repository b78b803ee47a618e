// One open conversation: its history, sending, following, stopping, regenerating.
import { Refusal, passing } from "./api.js";
import { Messages, outbox } from "./store.js";

const PAGE = 30;

export class Thread {
  #api;
  #view;
  #on;
  #messages = new Messages();
  #live = null; // the reply that is asked for or being written: { reply, question, body, regenerates, … }
  #alive = true;
  #paging = null;

  /** `on.changed(conversation)`: others should look again; `on.gone()`: it was deleted; `on.giveBack(text)`: unsent. */
  constructor(api, view, conversation, on) {
    this.#api = api;
    this.#view = view;
    this.#on = on;
    this.conversation = conversation;
  }

  get id() {
    return this.conversation?.conversationId ?? null;
  }

  get busy() {
    return this.#live !== null && !this.#live.over;
  }

  close() {
    this.#alive = false;
    this.#live?.controller.abort();
  }

  async load() {
    this.#draw();
    if (!this.id) return;
    await this.#page();
    this.#view.toEnd();
    const unsent = outbox.get(this.id);
    if (unsent) this.#resume(unsent);
    else this.#attach();
  }

  /** Read the newest page again: another tab may have gone on. */
  async refresh() {
    if (!this.id || this.#paging) return;
    await this.#page();
    if (!this.busy) this.#attach();
  }

  /** Read older messages; the place that is being read stays in sight. */
  async earlier() {
    if (this.#paging || !this.#messages.before) return;
    this.#paging = this.#page(this.#messages.before);
    try {
      await this.#paging;
    } finally {
      this.#paging = null;
    }
  }

  async #page(before = null) {
    const query = new URLSearchParams({ limit: PAGE, ...(before ? { before } : {}) });
    let page;
    try {
      page = await this.#api.json("GET", `/v1/conversations/${this.id}/messages?${query}`);
    } catch (error) {
      if (error instanceof Refusal && error.status === 404 && this.#alive) return this.#on.gone();
      throw error;
    }
    if (!this.#alive) return;
    this.#messages.merge(page, !before);
    if (before) this.#view.keepPlace(() => this.#draw());
    else this.#draw();
  }

  /** Send a message of the user's. Answers when its reply has ended. */
  async send(content) {
    if (this.busy) return;
    if (!this.id) {
      try {
        this.conversation = await this.#api.json("POST", "/v1/conversations", { title: titleOf(content) });
      } catch (error) {
        this.#on.giveBack(content);
        throw error;
      }
      if (!this.#alive) return;
      this.#on.changed(this.conversation);
    }
    const body = { content, clientMessageId: newId() };
    await this.#ask({ body, question: { role: "user", content, status: "COMPLETED" } });
  }

  /** Ask for another reply to the same message. */
  async regenerate(message) {
    if (this.busy) return;
    await this.#ask({ body: { clientMessageId: newId() }, regenerates: message });
  }

  async stop() {
    const live = this.#live;
    if (!live || live.over) return;
    if (live.generationId) return this.#cancel(live);
    if (live.stopWanted) {
      // Nothing has answered yet and the reader insists: give the text back.
      live.controller.abort();
      this.#giveUp(live);
      return;
    }
    live.stopWanted = true;
    this.#phase(live, "Stopping …");
  }

  async #cancel(live) {
    this.#phase(live, "Stopping …");
    await this.#api.json("POST", `/v1/generations/${live.generationId}/cancel`, undefined, true);
  }

  #giveUp(live) {
    if (this.id) outbox.remove(this.id);
    if (live.question) this.#on.giveBack(live.question.content);
    if (this.#live === live) this.#live = null;
    this.#draw();
  }

  /** A send from before the page was loaded again, whose answer is unknown or was a refusal. */
  #resume(unsent) {
    const question = { role: "user", content: unsent.body.content, status: "COMPLETED" };
    if (!unsent.refusal) return this.#quietly(this.#ask({ body: unsent.body, question }));
    this.#live = { ...this.#newLive({ body: unsent.body, question }), over: true };
    this.#showRefusal(this.#live, unsent.refusal);
  }

  #attach() {
    const last = this.#messages.all.findLast((one) => one.status === "STREAMING" && one.generationId);
    if (last) this.#quietly(this.#ask({ attach: last }));
  }

  #quietly(work) {
    work.catch((error) => this.#view.problem(error));
  }

  #newLive({ body = null, question = null, regenerates = null, attach = null }) {
    const reply = { role: "assistant", content: "", status: "STREAMING", phase: "Sending …", key: "live", ...attach };
    if (regenerates) reply.parentId = regenerates.parentId;
    const generationId = attach?.generationId ?? null;
    return { body, question, regenerates, reply, generationId, controller: new AbortController(), over: false };
  }

  #events(live) {
    const { signal } = live.controller;
    if (live.regenerates) return this.#api.regenerate(this.id, live.regenerates.seq, live.body, signal);
    if (live.body) return this.#api.send(this.id, live.body, signal);
    return this.#api.follow(live.generationId, signal);
  }

  async #ask(what) {
    const live = (this.#live = this.#newLive(what));
    if (live.question) outbox.put(this.id, { body: live.body });
    this.#view.clearProblem();
    this.#draw();
    if (!what.attach) this.#view.toEnd();
    try {
      for await (const event of this.#events(live)) {
        if (!this.#alive) return;
        await this.#apply(live, event);
      }
    } catch (error) {
      if (this.#alive) await this.#refused(live, error);
      return;
    }
    if (this.#alive && this.#live === live) await this.#ended(live);
  }

  async #apply(live, { kind, data, generationId }) {
    const { reply } = live;
    if (generationId && !live.generationId) {
      live.generationId = reply.generationId = generationId;
      outbox.remove(this.id); // saved: from here on history leads to it
      this.#on.changed(this.conversation);
      if (live.stopWanted) this.#quietly(this.#cancel(live));
    }
    if (kind === "connected") this.#phase(live, reply.content ? "" : "Waiting …");
    if (kind === "queued") this.#phase(live, waiting(data));
    if (kind === "reconnecting") this.#phase(live, reconnecting(data, live.generationId));
    if (kind === "started") await this.#started(live, data);
    if (kind === "delta") {
      reply.content += data.text;
      this.#phase(live, "");
    }
    if (kind === "done") Object.assign(reply, { status: data.status, usage: data.usage, finishReason: data.finishReason });
    if (kind === "error") Object.assign(reply, { status: "FAILED", problem: data.error?.message });
    if (kind === "done" || kind === "error") {
      reply.phase = "";
      this.#view.announce(kind === "done" ? `Reply: ${reply.content}` : "The reply broke off.");
    }
  }

  async #started(live, data) {
    const { reply } = live;
    const fresh = reply.seq !== data.seq || !reply.parentId;
    const { seq, messageId, model, degraded, servedBy } = data;
    Object.assign(reply, { seq, messageId, model, degraded, servedBy, content: "" });
    this.#phase(live, "Thinking …");
    if (!fresh) return;
    // Now both are saved: take their numbers and ids from history. Until that succeeds they stay at the end.
    this.#page().catch(() => {});
  }

  async #ended(live) {
    live.over = true;
    this.#keep(live);
    this.#draw();
    // The next message may be sent while this is read; then `#live` is already the next reply.
    await this.#page().catch(() => {});
    // A reply that ended in the queue never told its place: history has it.
    if (this.#live === live && this.#messages.all.some((one) => sameGeneration(one, live.reply))) this.#live = null;
    this.#draw();
    this.#on.changed(this.conversation);
  }

  /** What the stream told becomes part of what is known, whether or not history can be read just now. */
  #keep(live) {
    const { phase, key, ...reply } = live.reply;
    if (!reply.seq) return;
    if (live.question && !this.#messages.get(reply.seq - 1)) {
      this.#messages.put({ ...live.question, seq: reply.seq - 1, messageId: reply.parentId ?? null });
    }
    this.#messages.put({ ...this.#messages.get(reply.seq), ...reply });
    if (this.#live === live) this.#live = null;
  }

  async #refused(live, error) {
    live.over = true;
    const refusal = error instanceof Refusal ? error : null;
    if (refusal?.status === 401) throw error;
    if (refusal?.code === "conversation_busy") {
      this.#giveUp(live);
      this.#view.notice("A reply is already being written in this conversation. Your message is back in the box.");
      await this.#page();
      if (!this.busy && refusal.generationId) this.#attachTo(refusal.generationId);
      return;
    }
    if (refusal?.status === 404) {
      if (live.body) this.#giveUp(live);
      await this.#page();
      throw error;
    }
    const again = refusal === null || refusal.status === 429 || passing(refusal) || refusal.status >= 500;
    if (!again) {
      this.#giveUp(live);
      throw error;
    }
    const until = refusal?.retryAfter ? Date.now() + refusal.retryAfter * 1000 : 0;
    const told = { message: refusal?.message ?? "The connection was lost for too long.", until };
    if (live.question) outbox.put(this.id, { body: live.body, refusal: told });
    await this.#page().catch(() => {});
    this.#showRefusal(live, told);
  }

  #attachTo(generationId) {
    const known = this.#messages.all.find((one) => one.generationId === generationId);
    this.#quietly(this.#ask({ attach: known ?? { generationId } }));
  }

  /** The refused question stays in its place with a way to ask it again: the same send, so never twice. */
  #showRefusal(live, refusal) {
    const last = this.#messages.last;
    const saved = last?.status === "REFUSED" && this.#messages.all.find((one) => one.messageId === last.parentId);
    if (live.question && saved && saved.content === live.question.content) {
      Object.assign(live.reply, { seq: last.seq, messageId: last.messageId, parentId: last.parentId });
    }
    Object.assign(live.reply, { status: "REFUSED", phase: "", refusal });
    this.#view.announce(refusal.message);
    this.#draw();
  }

  #again(live) {
    if (this.busy) return;
    const { body, question, regenerates, generationId, reply } = live;
    if (generationId) this.#quietly(this.#ask({ attach: { ...reply, generationId, refusal: null, status: "STREAMING" } }));
    else this.#quietly(this.#ask({ body, question, regenerates }));
  }

  #phase(live, phase) {
    live.reply.phase = phase;
    if (this.#alive && this.#live === live) this.#view.updateReply(this.#shown(live.reply));
  }

  #shown(message) {
    const siblings = this.#messages.siblings(message);
    const waiting = this.#live?.reply === message && !siblings.includes(message.seq);
    if (waiting && this.#live.regenerates) siblings.push(...this.#messages.siblings(this.#live.regenerates), null);
    return { ...message, siblings: siblings.filter((seq) => seq !== undefined) };
  }

  /** History, with the living reply in its place. */
  #list() {
    const list = this.#messages.visible();
    if (!this.#live) return list;
    const { reply, question, regenerates } = this.#live;
    const isPlace = (one) => one.seq === reply.seq || sameGeneration(one, reply) || isSibling(one, regenerates);
    const place = list.findIndex((one) => one.role === "assistant" && isPlace(one));
    if (place >= 0) {
      reply.parentId ??= list[place].parentId;
      list[place] = reply;
    } else {
      const saved = this.#messages.get((reply.seq ?? 0) - 1);
      if (question && saved?.content !== question.content) list.push({ ...question, key: "question" });
      list.push(reply);
    }
    return list;
  }

  #draw() {
    if (!this.#alive) return;
    const actions = {
      regenerate: (message) => this.#quietly(this.regenerate(message)),
      again: () => this.#again(this.#live),
      sibling: (message, step) => {
        const { siblings } = this.#shown(message);
        this.#messages.show(this.#messages.get(siblings[siblings.indexOf(message.seq) + step]));
        this.#draw();
      },
    };
    const shown = this.#list().map((message) => this.#shown(message));
    this.#view.draw(shown, actions, { busy: this.busy, earlier: Boolean(this.#messages.before) });
  }
}

function sameGeneration(message, reply) {
  return Boolean(reply.generationId) && message.generationId === reply.generationId;
}

function isSibling(message, regenerates) {
  return regenerates !== null && message.parentId === regenerates.parentId;
}

function newId() {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint32Array(4)), (one) => one.toString(16)).join("-");
}

function titleOf(content) {
  const line = content.trim().split("\n")[0];
  return line.length > 60 ? `${[...line].slice(0, 57).join("").trimEnd()}…` : line;
}

function waiting({ position, estimatedWaitSeconds }) {
  const wait = estimatedWaitSeconds >= 1 ? ` · about ${Math.ceil(estimatedWaitSeconds)} s` : "";
  return `Waiting in line · place ${position}${wait}`;
}

function reconnecting({ offline }, generationId) {
  if (offline) return "You are offline. The reply goes on when the network is back.";
  return generationId ? "The connection dropped. Reconnecting …" : "The service does not answer. Trying again …";
}
