// One open conversation: its history, sending, following, stopping, regenerating.
import { Refusal } from "./api.js";
import { $, messageNode, showNotice, stickToEnd, updateMessage } from "./view.js";

const PAGE = 30;

export class Thread {
  #api;
  #changed;
  #messages = new Map(); // seq -> message
  #nodes = new Map(); // seq -> element
  #shown = new Map(); // parentId -> seq of the sibling on show
  #before = null;
  #following = null; // { generationId, controller, seq }
  #alive = true;

  /** `changed(conversation)` is called when the list should be read again. */
  constructor(api, conversation, changed) {
    this.#api = api;
    this.conversation = conversation;
    this.#changed = changed;
  }

  get id() {
    return this.conversation?.conversationId ?? null;
  }

  close() {
    this.#alive = false;
    this.#following?.controller.abort();
  }

  async load() {
    this.#draw();
    if (!this.id) return;
    await this.#page();
    this.#attachToRunning();
  }

  /** Read the newest page again: another tab may have gone on. */
  async refresh() {
    if (!this.id || this.#following) return;
    await this.#page(null, true);
    this.#attachToRunning();
  }

  async earlier() {
    await this.#page(this.#before);
  }

  async #page(before = null, newest = false) {
    const query = new URLSearchParams({ limit: PAGE, ...(before ? { before } : {}) });
    const page = await this.#api.json("GET", `/v1/conversations/${this.id}/messages?${query}`);
    if (!this.#alive) return;
    for (const message of page.data) this.#messages.set(message.seq, message);
    if (!newest || this.#before === null) this.#before = page.nextBefore;
    this.#draw();
    if (!before) $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  #attachToRunning() {
    const last = [...this.#messages.values()].sort((a, b) => a.seq - b.seq).at(-1);
    if (last?.status === "STREAMING" && last.generationId) {
      this.#consume((signal) => this.#api.follow(last.generationId, signal), last.seq);
    }
  }

  async send(content) {
    const clientMessageId = crypto.randomUUID();
    if (!this.id) {
      this.conversation = await this.#api.json("POST", "/v1/conversations", {});
      this.#changed(this.conversation);
    }
    const seq = Math.max(0, ...this.#messages.keys()) + 1;
    const pending = { seq, role: "user", content, status: "COMPLETED", messageId: `pending-${seq}`, parentId: null };
    this.#messages.set(seq, pending);
    this.#messages.set(seq + 1, this.#blank(seq + 1, pending.messageId));
    this.#draw();
    $("scroll").scrollTop = $("scroll").scrollHeight;
    const body = { content, clientMessageId };
    await this.#consume((signal) => this.#api.send(this.id, body, signal), seq + 1);
  }

  async regenerate(message) {
    const seq = Math.max(...this.#messages.keys()) + 1;
    this.#messages.set(seq, this.#blank(seq, message.parentId));
    this.#shown.delete(message.parentId);
    this.#draw();
    const body = { clientMessageId: crypto.randomUUID() };
    await this.#consume((signal) => this.#api.regenerate(this.id, message.seq, body, signal), seq);
  }

  async stop() {
    const generationId = this.#following?.generationId;
    if (generationId) await this.#api.json("POST", `/v1/generations/${generationId}/cancel`);
  }

  #blank(seq, parentId) {
    return { seq, role: "assistant", content: "", status: "STREAMING", parentId, messageId: null, model: null };
  }

  async #consume(events, seq) {
    const controller = new AbortController();
    const following = (this.#following = { generationId: null, controller, seq });
    const message = { ...this.#messages.get(seq), content: "", status: "STREAMING" };
    this.#put(message);
    this.#buttons();
    showNotice("");
    try {
      for await (const event of events(controller.signal)) {
        following.generationId = event.generationId ?? following.generationId;
        this.#apply(message, event);
      }
    } catch (error) {
      await this.#refused(error, seq);
    } finally {
      if (this.#following === following) this.#following = null;
      if (this.#alive) {
        this.#buttons();
        await this.#page(null, true).catch(() => {});
        this.#changed(this.conversation);
      }
    }
  }

  #apply(message, event) {
    if (!this.#alive) return;
    const { kind, data } = event;
    if (kind === "queued") {
      showNotice(`In the queue: place ${data.position}, about ${Math.ceil(data.estimatedWaitSeconds)} s`);
    } else if (kind === "reconnecting") {
      showNotice("The connection dropped; the reply goes on, reconnecting …");
    } else {
      showNotice("");
    }
    if (kind === "started") Object.assign(message, { model: data.model, degraded: data.degraded });
    if (kind === "delta") message.content += data.text;
    if (kind === "done") Object.assign(message, { status: data.status, usage: data.usage });
    if (kind === "error") {
      message.status = "FAILED";
      showNotice(data.error.message, true);
    }
    this.#put(message);
  }

  async #refused(error, seq) {
    if (!this.#alive) return;
    if (error instanceof Refusal && error.code === "conversation_busy" && error.generationId) {
      showNotice("Another reply is running in this conversation; showing it.");
      this.#messages.delete(seq);
      await this.#page(null, true);
      return;
    }
    const message = this.#messages.get(seq);
    if (message && !message.content) this.#put({ ...message, status: "REFUSED" });
    const wait = error.retryAfter ? ` Try again in ${duration(error.retryAfter)}.` : "";
    showNotice(error.message + wait, true);
  }

  #put(message) {
    this.#messages.set(message.seq, message);
    const node = this.#nodes.get(message.seq);
    if (node) stickToEnd(() => updateMessage(node, this.#withSiblings(message), this.#actions()));
    else this.#draw();
  }

  #buttons() {
    const streaming = this.#following !== null;
    $("stop").hidden = !streaming;
    $("send").hidden = streaming;
  }

  #withSiblings(message) {
    const siblings = [...this.#messages.values()]
      .filter((one) => one.role === "assistant" && one.parentId === message.parentId)
      .map((one) => one.seq)
      .sort((a, b) => a - b);
    return { ...message, siblings };
  }

  #actions() {
    return {
      regenerate: (message) => this.#following || this.regenerate(message),
      sibling: (message, place) => {
        const { siblings } = this.#withSiblings(message);
        this.#shown.set(message.parentId, siblings[place]);
        this.#draw();
      },
    };
  }

  /** Of replies to the same message only one is on show: the chosen one, else the newest. */
  #visible() {
    const all = [...this.#messages.values()].sort((a, b) => a.seq - b.seq);
    return all.filter((message) => {
      if (message.role !== "assistant") return true;
      const { siblings } = this.#withSiblings(message);
      return message.seq === (this.#shown.get(message.parentId) ?? siblings.at(-1));
    });
  }

  #draw() {
    if (!this.#alive) return;
    this.#nodes.clear();
    const nodes = this.#visible().map((message) => {
      const node = messageNode(this.#withSiblings(message), this.#actions());
      this.#nodes.set(message.seq, node);
      return node;
    });
    $("messages").replaceChildren(...nodes);
    $("empty").hidden = nodes.length > 0;
    $("earlier").hidden = !this.#before;
    this.#buttons();
  }
}

function duration(seconds) {
  if (seconds < 90) return `${seconds} s`;
  if (seconds < 5400) return `${Math.ceil(seconds / 60)} min`;
  return `${Math.ceil(seconds / 3600)} h`;
}
