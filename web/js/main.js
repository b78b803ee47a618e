// Signing in, the list of conversations, and the thread that is open.
import { Api, Refusal } from "./api.js";
import { Thread } from "./thread.js";
import { $, showConversations, showNotice } from "./view.js";

const channel = new BroadcastChannel("chat");
let api = null;
let thread = null;
let conversations = [];
let cursor = null;

async function start() {
  const config = await (await fetch("/config.json")).json();
  $("sign-in-form").onsubmit = (event) => {
    event.preventDefault();
    signIn(new FormData(event.target)).catch((error) => ($("sign-in-error").textContent = error.message));
  };
  $("sign-out").onclick = signOut;
  $("new").onclick = () => open(null);
  $("more").onclick = () => guard(loadMore);
  $("earlier").onclick = () => guard(() => thread.earlier());
  $("stop").onclick = () => guard(() => thread.stop());
  $("rename").onclick = () => guard(rename);
  $("delete").onclick = () => guard(remove);
  $("menu").onclick = () => menu(!$("sidebar").classList.contains("open"));
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    guard(send);
  };
  $("content").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      guard(send);
    }
  };
  $("content").oninput = grow;
  channel.onmessage = () => api && guard(async () => (await reload(), await thread?.refresh()));
  addEventListener("focus", () => api && guard(() => thread?.refresh()));
  const kept = JSON.parse(localStorage.getItem("session") ?? "null");
  if (kept) await enter(config, kept);
  else $("sign-in").hidden = false;
  $("user").focus();
}

async function signIn(form) {
  const response = await fetch("/local/sign-in", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ user: form.get("user"), plan: form.get("plan") }),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  const session = { token: answer.token, user: form.get("user"), plan: form.get("plan") };
  localStorage.setItem("session", JSON.stringify(session));
  await enter({ apiBase: "" }, session);
}

async function enter(config, session) {
  api = new Api(config.apiBase, session.token);
  $("sign-in").hidden = true;
  $("app").hidden = false;
  $("who").textContent = `${session.user} · ${session.plan === "plus" ? "Plus" : "Free"}`;
  await guard(async () => {
    await reload();
    const wanted = conversations.find((one) => one.conversationId === location.hash.slice(1));
    await open(wanted ?? null);
  });
}

function signOut() {
  localStorage.removeItem("session");
  location.hash = "";
  location.reload();
}

async function reload() {
  const page = await api.json("GET", "/v1/conversations?limit=30");
  conversations = page.data;
  cursor = page.nextCursor;
  list();
}

async function loadMore() {
  const page = await api.json("GET", `/v1/conversations?limit=30&cursor=${encodeURIComponent(cursor)}`);
  conversations = conversations.concat(page.data);
  cursor = page.nextCursor;
  list();
}

function list() {
  showConversations(conversations, thread?.id, (conversation) => guard(() => open(conversation)));
  $("more").hidden = !cursor;
  const current = conversations.find((one) => one.conversationId === thread?.id) ?? thread?.conversation;
  $("title").textContent = current?.title || "New chat";
  $("rename").hidden = $("delete").hidden = !thread?.id;
}

async function open(conversation) {
  thread?.close();
  showNotice("");
  thread = new Thread(api, conversation, (changed) => {
    location.hash = changed?.conversationId ?? "";
    channel.postMessage("changed");
    guard(reload);
  });
  location.hash = conversation?.conversationId ?? "";
  menu(false);
  list();
  await thread.load();
  $("content").focus();
}

async function send() {
  const content = $("content").value;
  if (!content.trim() || !$("stop").hidden) return;
  $("content").value = "";
  grow();
  await thread.send(content);
}

async function rename() {
  const title = prompt("Title", $("title").textContent);
  if (!title) return;
  await api.json("PATCH", `/v1/conversations/${thread.id}`, { title: title.slice(0, 200) });
  await reload();
}

async function remove() {
  if (!confirm("Delete this conversation with all its messages?")) return;
  await api.json("DELETE", `/v1/conversations/${thread.id}`);
  await open(null);
  await reload();
  channel.postMessage("changed");
}

function grow() {
  const area = $("content");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function menu(isOpen) {
  $("sidebar").classList.toggle("open", isOpen);
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

/** Run an action; a refusal is told, an expired session leads to signing in. */
async function guard(action) {
  try {
    await action();
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) signOut();
    else showNotice(error.message, true);
  }
}

start();
