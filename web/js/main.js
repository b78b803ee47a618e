// Signing in, the list of conversations, and the thread that is open.
import { Api, Refusal } from "./api.js";
import { session } from "./store.js";
import { Thread } from "./thread.js";
import { $, ThreadView, ask, showConversations, showNotice } from "./view.js";

const PAGE = 30;
const channel = new BroadcastChannel("chat");
const view = new ThreadView();
let config = { apiBase: "" };
let api = null;
let thread = null;
let conversations = [];
let cursor = null;

async function start() {
  connect();
  config = await (await fetch("/config.json")).json();
  const kept = session.get();
  if (kept) await enter(kept);
  else showSignIn();
}

function connect() {
  $("sign-in-form").onsubmit = (event) => {
    event.preventDefault();
    signIn(new FormData(event.target)).catch((error) => ($("sign-in-error").textContent = error.message));
  };
  $("sign-out").onclick = () => signOut();
  $("new").onclick = () => guard(() => open(null));
  $("more").onclick = () => guard(loadMore);
  $("earlier").onclick = () => guard(() => thread.earlier());
  $("stop").onclick = () => guard(() => thread.stop());
  $("rename").onclick = () => guard(rename);
  $("delete").onclick = () => guard(remove);
  $("menu").onclick = () => menu(!$("sidebar").classList.contains("open"));
  $("shade").onclick = () => menu(false);
  $("notice-close").onclick = () => showNotice("");
  $("scroll").onscroll = () => $("scroll").scrollTop < 60 && !$("earlier").hidden && guard(() => thread.earlier());
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    guard(send);
  };
  $("content").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    guard(send);
  };
  $("content").oninput = grow;
  addEventListener("keydown", (event) => event.key === "Escape" && menu(false));
  addEventListener("problem", (event) => tell(event.detail));
  addEventListener("hashchange", () => api && guard(openFromAddress));
  addEventListener("storage", (event) => event.key === "session" && !event.newValue && location.reload());
  const lookAgain = () => document.visibilityState === "visible" && api && guard(refresh);
  addEventListener("focus", lookAgain);
  addEventListener("online", lookAgain);
  document.addEventListener("visibilitychange", lookAgain);
  channel.onmessage = () => api && guard(refresh);
}

function showSignIn(reason = "") {
  $("app").hidden = true;
  $("sign-in").hidden = false;
  $("sign-in-error").textContent = reason;
  $("user").focus();
}

async function signIn(form) {
  const button = $("sign-in-form").querySelector("button");
  const [user, plan] = [form.get("user"), form.get("plan")];
  button.disabled = true;
  try {
    const response = await fetch("/local/sign-in", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ user, plan }),
    }).catch(() => Promise.reject(new Error("The service cannot be reached. Check that it runs, then try again.")));
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(answer.error?.message ?? "Signing in failed. Try again.");
    session.set({ token: answer.token, user, plan });
    await enter(session.get());
  } finally {
    button.disabled = false;
  }
}

async function enter({ token, user, plan }) {
  api = new Api(config.apiBase, token);
  $("sign-in").hidden = true;
  $("app").hidden = false;
  $("sign-in-error").textContent = "";
  $("who").textContent = user;
  $("plan").textContent = plan === "plus" ? "Plus" : "Free";
  await guard(async () => {
    await Promise.all([reload(), openFromAddress()]);
    list();
  });
}

function signOut(reason = "") {
  thread?.close();
  thread = api = null;
  conversations = [];
  session.clear();
  sessionStorage.clear(); // unsent messages belong to the account
  history.replaceState(null, "", "#");
  $("messages").replaceChildren();
  $("content").value = "";
  showNotice("");
  showSignIn(reason);
}

async function refresh() {
  await Promise.all([reload(), thread?.refresh()]);
}

/** Read the newest page of the list again and keep what was loaded below it. */
async function reload() {
  const page = await api.json("GET", `/v1/conversations?limit=${PAGE}`);
  const below = page.nextCursor ? conversations.slice(PAGE) : [];
  const fresh = new Set(page.data.map((one) => one.conversationId));
  const oldest = page.data.at(-1)?.updatedAt ?? "";
  const kept = below.filter((one) => !fresh.has(one.conversationId) && one.updatedAt <= oldest);
  conversations = [...page.data, ...kept];
  if (kept.length === 0) cursor = page.nextCursor;
  list();
}

async function loadMore() {
  const page = await api.json("GET", `/v1/conversations?limit=${PAGE}&cursor=${encodeURIComponent(cursor)}`);
  const known = new Set(conversations.map((one) => one.conversationId));
  conversations = [...conversations, ...page.data.filter((one) => !known.has(one.conversationId))];
  cursor = page.nextCursor;
  list();
}

function list() {
  showConversations(conversations, thread?.id, (conversation) => guard(() => open(conversation)));
  $("more").hidden = !cursor;
  $("no-conversations").hidden = conversations.length > 0;
  const current = conversations.find((one) => one.conversationId === thread?.id) ?? thread?.conversation;
  const title = current?.title || "New chat";
  $("title").textContent = title;
  document.title = thread?.id ? `${title} · Chat` : "Chat";
  $("rename").hidden = $("delete").hidden = !thread?.id;
}

/** The address names the open conversation, so that reload and the back button find it. */
async function openFromAddress() {
  const id = location.hash.slice(1);
  if (thread && (thread.id ?? "") === id) return;
  if (!id) return open(null);
  try {
    await open(await api.json("GET", `/v1/conversations/${encodeURIComponent(id)}`));
  } catch (error) {
    if (!(error instanceof Refusal && error.status === 404)) throw error;
    await open(null);
    showNotice("That conversation is not there any more.");
  }
}

async function open(conversation) {
  thread?.close();
  showNotice("");
  const opened = new Thread(api, view, conversation, {
    changed: (changed) => {
      if (thread === opened) address(changed.conversationId);
      channel.postMessage("changed");
      guard(reload);
    },
    gone: () => {
      if (thread !== opened) return;
      guard(() => open(null)).then(() => showNotice("This conversation was deleted."));
    },
    giveBack: (text) => {
      if (thread !== opened) return;
      $("content").value = $("content").value.trim() ? `${text}\n${$("content").value}` : text;
      grow();
    },
  });
  thread = opened;
  address(conversation?.conversationId ?? "");
  menu(false);
  list();
  $("content").focus();
  await opened.load();
}

function address(id) {
  if (location.hash.slice(1) !== id) history.pushState(null, "", `#${id}`);
}

async function send() {
  const content = $("content").value;
  if (!content.trim() || thread.busy) return;
  $("content").value = "";
  grow();
  await thread.send(content);
}

async function rename() {
  const { id } = thread;
  const title = await ask({ title: "Rename conversation", value: $("title").textContent, act: "Rename" });
  if (!title) return;
  await api.json("PATCH", `/v1/conversations/${id}`, { title });
  channel.postMessage("changed");
  await reload();
}

async function remove() {
  const { id } = thread;
  const text = `“${$("title").textContent}” and all its messages will be gone.`;
  if (!(await ask({ title: "Delete this conversation?", text, act: "Delete", danger: true }))) return;
  await api.json("DELETE", `/v1/conversations/${id}`);
  conversations = conversations.filter((one) => one.conversationId !== id);
  if (thread.id === id) await open(null);
  channel.postMessage("changed");
  await reload();
}

function grow() {
  const area = $("content");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function menu(isOpen) {
  $("sidebar").classList.toggle("open", isOpen);
  $("shade").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

/** Run an action; a refusal is told, an expired session leads to signing in. */
async function guard(action) {
  try {
    await action();
  } catch (error) {
    tell(error);
  }
}

function tell(error) {
  if (!api) return;
  if (error instanceof Refusal && error.status === 401) return signOut("Your session has ended. Sign in again.");
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  showNotice(error.message + wait, true);
}

start().catch(() => showSignIn("The service cannot be reached. Reload the page to try again."));
