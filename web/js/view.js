// What is on the page: the list of conversations and the messages. Draws; decides nothing.
import { render } from "./markdown.js";

export const $ = (id) => document.getElementById(id);

const MARKS = { CANCELLED: "Stopped", FAILED: "The model failed; ask again", REFUSED: "Not answered; send again" };

export function showConversations(conversations, currentId, open) {
  $("conversations").replaceChildren(
    ...conversations.map((conversation) => {
      const button = document.createElement("button");
      button.textContent = conversation.title || "New chat";
      button.setAttribute("aria-current", String(conversation.conversationId === currentId));
      button.onclick = () => open(conversation);
      const item = document.createElement("li");
      item.append(button);
      return item;
    }),
  );
}

export function showNotice(text, bad = false) {
  $("notice").textContent = text;
  $("notice").classList.toggle("bad", bad);
}

/** A message's element; `update` draws it anew from the message. */
export function messageNode(message, actions) {
  const item = document.createElement("li");
  item.className = `message ${message.role}`;
  const body = document.createElement("div");
  body.className = "body";
  const foot = document.createElement("div");
  foot.className = "foot";
  item.append(body, foot);
  updateMessage(item, message, actions);
  return item;
}

export function updateMessage(item, message, actions) {
  const [body, foot] = item.children;
  item.dataset.seq = message.seq;
  item.dataset.status = message.status;
  item.classList.toggle("streaming", message.status === "STREAMING");
  if (message.role === "user") body.textContent = message.content;
  else body.replaceChildren(render(message.content));
  foot.replaceChildren(...footOf(message, actions));
}

function footOf(message, actions) {
  if (message.role !== "assistant" || message.status === "STREAMING") return [];
  const parts = [];
  if (message.siblings?.length > 1) {
    const place = message.siblings.indexOf(message.seq);
    parts.push(
      button("‹", "Earlier reply", () => actions.sibling(message, place - 1), place === 0),
      span(`${place + 1}/${message.siblings.length}`),
      button("›", "Later reply", () => actions.sibling(message, place + 1), place === message.siblings.length - 1),
    );
  }
  if (MARKS[message.status]) parts.push(span(MARKS[message.status], "mark"));
  if (message.model) parts.push(span(message.degraded ? `${message.model} (smaller model)` : message.model));
  if (message.usage) parts.push(span(`${message.usage.outputTokens} tokens`));
  parts.push(button("Regenerate", "Ask for another reply", () => actions.regenerate(message)));
  return parts;
}

function span(text, className = "") {
  const node = document.createElement("span");
  node.textContent = text;
  node.className = className;
  return node;
}

function button(text, label, act, disabled = false) {
  const node = document.createElement("button");
  node.className = "quiet";
  node.textContent = text;
  node.title = label;
  node.disabled = disabled;
  node.onclick = act;
  return node;
}

/** Keep the end in sight while a reply grows, unless the reader has scrolled up. */
export function stickToEnd(change) {
  const scroll = $("scroll");
  const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  change();
  if (near) scroll.scrollTop = scroll.scrollHeight;
}
