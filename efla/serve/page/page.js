// Sends a request for a node and adds what comes. whole: without a stored state.
async function request(node, index, whole) {
  const { session, rest } = whole ? { session: null, rest: pathTo(node.parent).map((i) => nodes[i]) } : start(node.parent);
  const name = newName();
  const body = { ...views[view].body(rest, node), save_as: name, disposable: true, stream: true, ...sampling() };
  if (session) body.session = session;
  if (session && body.prompt === "") delete body.prompt;
  const begin = performance.now();
  let reply;
  try {
    reply = await call("POST", views[view].path, body, running.signal);
  } catch (error) {
    const forgotten = error.status === 404;
    if (!session || !(forgotten || (error.status === 400 && views[view].resends))) throw error;
    if (forgotten) for (const other of nodes) other.session = null;  // compute the states again
    return request(node, index, true);
  }
  let finished = "", first = 0, count = 0;
  await readEvents(reply, (event) => {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice && views[view].receive(node, index, choice)) {
      if (first === 0) first = performance.now();
      showSpeed(count, first, begin);
      ++node.tokens;
      if (++count % 8 === 0) showSize();
    }
    if (choice?.finish_reason) finished = choice.finish_reason;
  });
  if (!["stop", "length", "tool_calls"].includes(finished)) return;
  try {
    node.tokens = (await (await call("GET", "/v1/sessions/" + name)).json()).tokens;
    node.session = name;
  } catch (error) {
    if (error.status !== 404) throw error;  // otherwise the server has dropped the state already
  }
}

// Shows the rate of the tokens after the first one.
function showSpeed(tokens, first, begin) {
  const seconds = (performance.now() - first) / 1000;
  if (seconds <= 0.2) return;
  $("speed").textContent = (tokens / seconds).toFixed(0) + " tokens/s, first after " + (first - begin).toFixed(0) + " ms";
}

// Continues a node with a new one of these fields.
async function run(parent, fields) {
  if (running) return;
  $("error").textContent = "";
  running = new AbortController();
  const before = current;
  const node = add(parent, fields), index = current;
  show();
  try {
    await request(node, index, false);
  } catch (error) {
    if (error.name !== "AbortError") $("error").textContent = error.message;
    if (views[view].isEmpty(node)) {
      nodes.pop();
      current = before;
      if ($("input").value === "") $("input").value = views[view].written(node);
    }
  }
  running = null;
  show();
}

async function forget() {
  const names = nodes.map((node) => node.session).filter(Boolean);
  nodes = [];
  current = -1;
  $("speed").textContent = "";
  $("error").textContent = "";
  show();
  for (const name of names) await call("DELETE", "/v1/sessions/" + clean(name)).catch(() => {});
}

async function begin() {
  try {
    model = (await (await call("GET", "/v1/models")).json()).data[0];
    if (!load()) view = (await (await call("GET", "/tokenizer_info")).json()).chat_template ? "chat" : "text";
  } catch (error) {
    $("error").textContent = error.message;
    return;
  }
  $("model").textContent = model.id + ", " + model.parameters.toLocaleString("en") + " parameters, " + model.weights;
  document.title = model.id + " – efla";
  showView(view);
  document.documentElement.dataset.ready = "true";
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (running || !model) return;
  let fields;
  try {
    fields = views[view].next($("input").value);
  } catch (error) {
    $("error").textContent = error.message;
    return;
  }
  $("input").value = "";
  run(current, fields);
};
$("input").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("composer").requestSubmit();
};
document.onkeydown = (event) => { if (event.key === "Escape" && running) running.abort(); };
$("stop").onclick = () => running?.abort();
$("again").onclick = () => run(nodes[current].parent, views[view].again(nodes[current]));
$("new").onclick = forget;
$("key").onchange = begin;
for (const name of Object.keys(views)) {
  $("view-" + name).onclick = () => {
    if (running || !model) return;
    trees[view] = { nodes, current };
    showView(name);
  };
}
// A page that is hidden or left may never run again. Saves only during a reply: another tab may have saved since the last one.
const saveReply = () => { if (running) save(); };
document.addEventListener("visibilitychange", saveReply);
window.addEventListener("pagehide", saveReply);
begin();
