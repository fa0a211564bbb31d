"use strict";
const $ = (id) => document.getElementById(id);
const kStore = "efla-page";

// What both views share: the server, trees of nodes, and the panels beside them. A view has one tree. A node continues its
// parent. Its `session` is the name of the stored state after it; null where the state is not stored, which the next request
// computes from the nodes. `tokens` is the length of all up to its end.
const views = {};  // by name: how nodes are shown and sent (text.js, chat.js)
const trees = { text: { nodes: [], current: -1 }, chat: { nodes: [], current: -1 } };
let view = "text";
let model = null;
let nodes = [];
let current = -1;
let running = null;

const clean = (name) => name.replace(/[^A-Za-z0-9._-]/g, "");
const newName = () => "page-" + [...crypto.getRandomValues(new Uint8Array(9))].map((b) => b.toString(16).padStart(2, "0")).join("");

// Returns an element of a class with children, which may be texts.
function made(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

function pathTo(index) {
  const path = [];
  for (let i = index; i >= 0; i = nodes[i].parent) path.unshift(i);
  return path;
}

function save() {
  trees[view] = { nodes, current };
  try {
    localStorage.setItem(kStore, JSON.stringify({ sha256: model.sha256, view, trees }));
  } catch { /* the texts are longer than the browser keeps */ }
}

// Returns whether the browser has kept trees of this model.
function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(kStore));
    if (!kept || kept.sha256 !== model.sha256 || !(kept.view in views)) return false;
    Object.assign(trees, kept.trees);
    view = kept.view;
    return true;
  } catch {
    return false;
  }
}

function headers() {
  const key = $("key").value;
  return key ? { "Content-Type": "application/json", Authorization: "Bearer " + key } : { "Content-Type": "application/json" };
}

async function call(method, path, body, signal) {
  const reply = await fetch(path, { method, headers: headers(), body: body && JSON.stringify(body), signal });
  if (reply.ok) return reply;
  if (reply.status === 401) $("key-label").hidden = false;
  const error = new Error((await reply.json().catch(() => null))?.error?.message ?? "status " + reply.status);
  error.status = reply.status;
  throw error;
}

async function readEvents(reply, receive) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) receive(JSON.parse(event.slice(6)));
    }
  }
}

function bytesText(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < 4) { bytes /= 1000; ++unit; }
  return (unit === 0 ? bytes : bytes.toPrecision(3)) + " " + units[unit];
}

function showSize() {
  const tokens = current < 0 ? 0 : nodes[current].tokens;
  const kv = tokens * model.kv_bytes_per_token, pages = tokens * model.session_bytes_per_token;
  const state = model.session_bytes + pages;
  const most = Math.max(kv, state);
  $("state-bytes").textContent = bytesText(state);
  $("kv-bytes").textContent = bytesText(kv);
  $("state-bar").style.width = (100 * model.session_bytes) / most + "%";
  $("pages-bar").style.width = (100 * pages) / most + "%";
  $("kv-bar").style.width = (100 * kv) / most + "%";
  $("parts").hidden = model.session_bytes_per_token === 0;
  $("parts").textContent = "constant part " + bytesText(model.session_bytes) + ", pages of keys and values " + bytesText(pages);
  $("size-note").textContent =
    tokens.toLocaleString("en") + " tokens. " + (model.session_bytes_per_token === 0
      ? "The state has this size for any length"
      : "The pages grow by " + bytesText(model.session_bytes_per_token) + " per token, and copies share them") +
    "; softmax attention of the same width, in 16 bits, would keep " + bytesText(1e6 * model.kv_bytes_per_token) + " for a million tokens.";
}

function showTree() {
  const depth = (i) => pathTo(i).length - 1;
  const items = [];
  const visit = (parent) => nodes.forEach((node, i) => {
    if (node.parent !== parent) return;
    const item = document.createElement("li"), button = document.createElement("button");
    button.style.paddingLeft = 0.5 + Math.min(depth(i), 8) * 0.75 + "rem";
    button.textContent = views[view].label(node).trim().replace(/\s+/g, " ").slice(0, 60) || "(nothing)";
    if (i === current) button.setAttribute("aria-current", "true");
    button.onclick = () => { if (!running) { current = i; show(); } };
    item.append(button);
    items.push(item);
    visit(i);
  });
  visit(-1);
  $("tree").replaceChildren(...items);
}

function show() {
  $("go").disabled = running !== null;
  $("stop").disabled = running === null;
  $("again").disabled = running !== null || current < 0 || views[view].isEmpty(nodes[current]);
  for (const id of ["new", "view-text", "view-chat"]) $(id).disabled = running !== null;
  $("hint").hidden = current >= 0;
  views[view].draw();
  showTree();
  showSize();
  save();
}

// Shows the tree of a view.
function showView(name) {
  view = name;
  ({ nodes, current } = trees[name]);
  document.body.dataset.view = name;
  for (const other of Object.keys(views)) $("view-" + other).setAttribute("aria-pressed", String(other === name));
  const words = views[name].words;
  for (const id of ["go", "new", "hint", "tree-note"]) $(id).textContent = words[id];
  $("input").placeholder = words.placeholder;
  $("input").setAttribute("aria-label", words.input);
  $("speed").textContent = "";
  $("error").textContent = "";
  show();
}

function add(parent, fields) {
  nodes.push({ parent, ...fields, session: null, tokens: parent < 0 ? 0 : nodes[parent].tokens });
  current = nodes.length - 1;
  return nodes[current];
}

// Returns the stored state that a node can be continued from, and the nodes behind it.
function start(index) {
  const rest = [];
  for (let i = index; i >= 0; i = nodes[i].parent) {
    if (nodes[i].session) return { session: nodes[i].session, rest };
    rest.unshift(nodes[i]);
  }
  return { session: null, rest };
}

function sampling() {
  const chosen = {};
  for (const name of ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"]) {
    if ($(name).value !== "") chosen[name] = Number($(name).value);
  }
  if ($("stop_text").value !== "") chosen.stop = $("stop_text").value.replaceAll("\\n", "\n");
  return chosen;
}
