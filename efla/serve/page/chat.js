// The view of a chat. A node is a turn: the messages that are `sent`, and the `reply`.
const emptyReply = () => ({ reasoning: "", content: "", calls: [], finish: "" });

// Returns the messages of a turn as the API takes them. A call that was cut off is none.
function messagesOf(node) {
  const { reasoning, content, calls } = node.reply;
  const whole = calls.filter((one) => { try { JSON.parse(one.arguments); return true; } catch { return false; } });
  const message = { role: "assistant", content };
  if (reasoning) message.reasoning_content = reasoning;
  if (whole.length > 0) {
    message.tool_calls = whole.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return [...node.sent, message];
}

function prettyArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Returns a call. open: with a field for its result.
function callElement(one, open) {
  const element = made("div", "call", made("b", "", one.name), made("pre", "", prettyArguments(one.arguments)));
  if (!open) return element;
  const result = made("textarea", "result");
  result.dataset.call = one.id;
  result.placeholder = "what " + one.name + " returns";
  result.setAttribute("aria-label", "Result of " + one.name);
  element.append(result);
  return element;
}

function sentElement(message) {
  return made("div", "message " + message.role, made("h3", "", message.role), made("div", "content", message.content));
}

// Returns the reply of a turn, and keeps its parts as `parts`, so that pieces can be added while it is written.
function replyElement(node, last) {
  const text = made("div", "content"), summary = made("summary", ""), calls = made("div", "calls"), note = made("p", "note");
  const thoughts = made("div", "content");
  const reasoning = made("details", "reasoning", summary, thoughts);
  const element = made("div", "message assistant" + (last && running ? " busy" : ""), made("h3", "", "assistant"), reasoning, text, calls, note);
  const parts = { text, summary, calls, note, thoughts, reasoning };
  fillReply(parts, node.reply, last && !running);
  if (last) views.chat.parts = parts;
  return element;
}

// Shows what a reply has so far. open: its calls have fields for results.
function fillReply(parts, reply, open) {
  const words = reply.reasoning.split(/\s+/).filter(Boolean).length;
  parts.reasoning.hidden = reply.reasoning === "";
  parts.summary.textContent = "Reasoning, " + words + (words === 1 ? " word" : " words");
  parts.thoughts.textContent = reply.reasoning;
  parts.text.textContent = reply.content;
  parts.calls.replaceChildren(...reply.calls.map((one) => callElement(one, open)));
  parts.note.textContent = reply.finish === "length" ? "cut off: more tokens than asked for" : "";
}

// Adds a call's beginning or a piece of its arguments.
function addCall(calls, delta) {
  if (delta.id) calls[delta.index] = { id: delta.id, name: delta.function.name, arguments: "" };
  calls[delta.index].arguments += delta.function.arguments ?? "";
}

// Returns the results that the user wrote for the calls of the last reply.
function results() {
  const field = (id) => [...document.querySelectorAll("#chat .result")].find((one) => one.dataset.call === id);
  const calls = current < 0 ? [] : nodes[current].reply.calls;
  return calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: field(id)?.value ?? "" }));
}

views.chat = {
  path: "/v1/chat/completions",
  words: {
    go: "Send", new: "New chat", hint: "Write a message. The model replies.", input: "Your message", placeholder: "Hello",
    "tree-note": "Click a branch to return to it. The next message continues from there.",
  },
  resends: true,  // whole, where the template cannot continue a stored state

  label: (node) => (node.sent.findLast((message) => message.role !== "system")?.content ?? "").slice(0, 28) + " – " +
    (node.reply.content || node.reply.calls[0]?.name || ""),
  isEmpty: ({ reply }) => !reply.reasoning && !reply.content && reply.calls.length === 0,
  again: (node) => ({ sent: node.sent, reply: emptyReply() }),
  written: (node) => node.sent.find((message) => message.role === "user")?.content ?? "",

  next(own) {
    const sent = results();
    if (own !== "") sent.push({ role: "user", content: own });
    if (sent.length === 0) throw new Error("Write a message first.");
    if (current < 0 && $("system").value !== "") sent.unshift({ role: "system", content: $("system").value });
    return { sent, reply: emptyReply() };
  },

  body(rest, node) {
    const body = { messages: [...rest.flatMap(messagesOf), ...node.sent] };
    if ($("thinking").value !== "") body.enable_thinking = $("thinking").value === "on";
    if ($("tools").value.trim() === "") return body;
    try {
      body.tools = JSON.parse($("tools").value);
    } catch (error) {
      throw new Error("The tools are not JSON: " + error.message);
    }
    return body;
  },

  draw() {
    $("chat").replaceChildren(...pathTo(current).flatMap((i) => [...nodes[i].sent.map(sentElement), replyElement(nodes[i], i === current)]));
    $("chat").lastElementChild?.scrollIntoView({ block: "nearest" });  // above the composer, which stays in view
  },

  receive(node, index, choice) {
    const delta = choice.delta ?? {}, { reply } = node;
    if (choice.finish_reason) reply.finish = choice.finish_reason;
    reply.reasoning += delta.reasoning_content ?? "";
    reply.content += delta.content ?? "";
    for (const one of delta.tool_calls ?? []) addCall(reply.calls, one);
    const wrote = Boolean(delta.reasoning_content || delta.content || delta.tool_calls);
    if (wrote) fillReply(this.parts, reply, false);
    return wrote;
  },
};
