// What is on the page: the list of conversations, the messages, questions. Draws; decides nothing.
import { render } from "./markdown.js";

export const $ = (id) => document.getElementById(id);

const MARKS = {
  CANCELLED: ["Stopped", "soft"],
  FAILED: ["The reply broke off. Regenerate to try again.", "bad"],
  REFUSED: ["Not answered.", "bad"],
};

export function showConversations(conversations, currentId, open) {
  const items = conversations.map((conversation) => {
    const current = conversation.conversationId === currentId;
    const link = make("button", { className: "conversation", type: "button" }, conversation.title || "New chat");
    if (current) link.setAttribute("aria-current", "page");
    link.onclick = () => open(conversation);
    return make("li", {}, link);
  });
  $("conversations").replaceChildren(...items);
}

/** The open thread. Message elements are kept over draws, so that focus, selection and scroll stay. */
export class ThreadView {
  #nodes = new Map(); // key -> { node, drawn }
  #actions = {};
  #frame = 0;
  #next = null;

  draw(messages, actions, { busy, earlier }) {
    this.#actions = actions;
    cancelAnimationFrame(this.#frame); // what waited for a frame is older than this; hidden tabs have no frames
    this.#frame = 0;
    const kept = this.#nodes;
    this.#nodes = new Map();
    const nodes = messages.map((message) => {
      const key = message.seq ?? message.key;
      const entry = kept.get(key) ?? { node: frame(message), drawn: "" };
      this.#nodes.set(key, entry);
      this.#fill(entry, message);
      return entry.node;
    });
    stickToEnd(() => place($("messages"), nodes));
    $("empty").hidden = nodes.length > 0;
    $("earlier").hidden = !earlier;
    $("stop").hidden = !busy;
    $("send").hidden = busy;
  }

  /** Draw one growing reply, at most once a frame. */
  updateReply(message) {
    this.#next = message;
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      const entry = this.#nodes.get(this.#next.seq ?? this.#next.key) ?? this.#nodes.get(this.#next.key);
      if (entry) stickToEnd(() => this.#fill(entry, this.#next));
    });
  }

  #fill(entry, message) {
    const drawn = JSON.stringify(message);
    if (drawn === entry.drawn) return;
    entry.drawn = drawn;
    fill(entry.node, message, this.#actions);
  }

  toEnd() {
    $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  /** Change what is above without moving what is read. */
  keepPlace(change) {
    const scroll = $("scroll");
    const fromEnd = scroll.scrollHeight - scroll.scrollTop;
    change();
    scroll.scrollTop = scroll.scrollHeight - fromEnd;
  }

  announce(text) {
    $("announce").textContent = text;
  }

  notice(text) {
    showNotice(text);
  }

  clearProblem() {
    showNotice("");
  }

  problem(error) {
    dispatchEvent(new CustomEvent("problem", { detail: error }));
  }
}

export function showNotice(text, bad = false) {
  $("notice").hidden = !text;
  $("notice-text").textContent = text;
  $("notice").classList.toggle("bad", bad);
}

function frame(message) {
  const who = message.role === "user" ? "You" : "Assistant";
  return make(
    "li",
    { className: `message ${message.role}` },
    make("h3", { className: "visually-hidden" }, who),
    make("div", { className: "body" }),
    make("div", { className: "foot" }),
  );
}

function fill(node, message, actions) {
  const [, body, foot] = node.children;
  node.dataset.seq = message.seq ?? "";
  node.dataset.status = message.status;
  node.classList.toggle("streaming", message.status === "STREAMING");
  node.classList.toggle("empty-reply", !message.content);
  node.setAttribute("aria-busy", String(message.status === "STREAMING"));
  if (message.role === "user") body.textContent = message.content;
  else body.replaceChildren(render(message.content));
  if (message.role === "assistant") foot.replaceChildren(...footOf(message, actions));
}

function footOf(message, actions) {
  if (message.status === "STREAMING") {
    const parts = message.phase ? [make("span", { className: "phase" }, message.phase)] : [];
    return message.content ? [...parts, ...facts(message)] : parts;
  }
  const parts = [];
  if (message.siblings.length > 1) parts.push(switcher(message, actions));
  if (message.refusal) return [...parts, ...refused(message.refusal, actions)];
  const [text, tone] = MARKS[message.status] ?? [];
  if (text) parts.push(make("span", { className: `mark ${tone}`, title: message.problem ?? "" }, text));
  if (message.finishReason === "length") parts.push(make("span", { className: "mark soft" }, "Cut at the length limit"));
  parts.push(...facts(message));
  if (message.content) parts.push(copyButton(message));
  const label = message.status === "REFUSED" ? "Try again" : "Regenerate";
  if (message.seq && message.parentId) parts.push(button(label, "Ask for another reply", () => actions.regenerate(message)));
  return parts;
}

function facts(message) {
  const parts = [];
  if (message.model) parts.push(make("span", { className: "model" }, message.model));
  if (message.degraded) {
    const why = "The larger model was busy; a smaller one answered.";
    parts.push(make("span", { className: "badge", title: why }, "smaller model"));
  }
  if (message.usage?.outputTokens) parts.push(make("span", {}, `${message.usage.outputTokens} tokens`));
  return parts;
}

function switcher(message, actions) {
  const { siblings } = message;
  const at = siblings.indexOf(message.seq);
  const group = make("span", { className: "switcher" });
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Replies to this message");
  group.append(
    button("‹", "Earlier reply", () => actions.sibling(message, -1), at <= 0),
    make("span", {}, `reply ${at < 0 ? siblings.length : at + 1}/${siblings.length}`),
    button("›", "Later reply", () => actions.sibling(message, 1), at < 0 || at === siblings.length - 1),
  );
  return group;
}

/** A refusal and the way on; while it must wait, the button counts down. */
function refused({ message, until }, actions) {
  const again = button("Try again", "Send the same message again", () => actions.again());
  again.classList.add("again");
  const tick = () => {
    const left = Math.ceil((until - Date.now()) / 1000);
    again.disabled = left > 0;
    again.textContent = left > 0 ? `Try again in ${duration(left)}` : "Try again";
    if (left > 0) setTimeout(() => again.isConnected && tick(), 250);
  };
  queueMicrotask(tick);
  return [make("span", { className: "mark bad" }, message), again];
}

function copyButton(message) {
  const node = button("Copy", "Copy this reply", async () => {
    await navigator.clipboard.writeText(message.content);
    node.textContent = "Copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

function duration(seconds) {
  if (seconds < 90) return `${seconds} s`;
  if (seconds < 5400) return `${Math.ceil(seconds / 60)} min`;
  return `${Math.ceil(seconds / 3600)} h`;
}

function button(text, label, act, disabled = false) {
  const node = make("button", { className: "quiet", type: "button", title: label, disabled, onclick: act }, text);
  if (text.length === 1) node.setAttribute("aria-label", label);
  return node;
}

function make(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** Put the nodes into the parent in this order, moving only what is not in its place. */
function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, at) => parent.children[at] === node || parent.insertBefore(node, parent.children[at] ?? null));
}

/** Keep the end in sight while a reply grows, unless the reader has scrolled up. */
function stickToEnd(change) {
  const scroll = $("scroll");
  const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  change();
  if (near) scroll.scrollTop = scroll.scrollHeight;
}

/** Ask the user. Answers the text (with a field), true (without), or null when they think better of it. */
export function ask({ title, text = "", value = null, act, danger = false }) {
  const dialog = $("ask");
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-text").hidden = !text;
  $("ask-field").hidden = value === null;
  $("ask-value").value = value ?? "";
  $("ask-value").required = value !== null;
  $("ask-act").textContent = act;
  $("ask-act").classList.toggle("danger", danger);
  $("ask-cancel").onclick = () => dialog.close("");
  dialog.returnValue = "";
  dialog.showModal();
  if (value === null) $("ask-cancel").focus();
  else $("ask-value").select();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (dialog.returnValue !== "act") resolve(null);
      else resolve(value === null ? true : $("ask-value").value.trim() || null);
    };
  });
}
