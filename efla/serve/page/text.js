// The view of one text. A node has what the user wrote, `own`, and then what the model wrote, in `pieces`.
const textOf = (node) => node.own + node.pieces.join("");

function piece(node, index, text) {
  const span = made("span", index < 0 ? "own" : "piece", text);
  if (index >= 0) span.onclick = () => branch(node, index);
  return span;
}

// Makes a branch that ends behind one piece of a node.
function branch(index, at) {
  if (running) return;
  const from = nodes[index];
  if (at + 1 === from.pieces.length) { current = index; return show(); }
  const node = add(from.parent, { own: from.own, pieces: from.pieces.slice(0, at + 1) });
  node.tokens = from.tokens - (from.pieces.length - at - 1);
  show();
}

views.text = {
  path: "/v1/completions",
  words: {
    go: "Continue", new: "New text", hint: "Write the beginning of a text. The model continues it.", input: "Your text",
    placeholder: "Once upon a time", "tree-note": "Click a branch to return to it, or a word of the text to branch off behind it.",
  },
  resends: false,

  label: textOf,
  isEmpty: (node) => node.pieces.length === 0,
  again: (node) => ({ own: node.own, pieces: [] }),
  written: (node) => node.own,

  // Returns the fields of a node for what the user wrote.
  next(own) {
    if (current < 0 && own === "") throw new Error("Write the beginning of a text first.");
    return { own, pieces: [] };
  },

  // Returns the fields of a request that continues these nodes with a new one.
  body(rest, node) {
    return { prompt: rest.map(textOf).join("") + node.own };
  },

  draw() {
    const spans = [];
    for (const i of pathTo(current)) {
      if (nodes[i].own) spans.push(piece(i, -1, nodes[i].own));
      nodes[i].pieces.forEach((text, at) => spans.push(piece(i, at, text)));
    }
    if (running) spans.push(made("span", "caret", "\u00a0"));
    $("text").replaceChildren(...spans);
  },

  // Adds a choice of an event to a node. Returns whether it has text.
  receive(node, index, choice) {
    if (!choice.text) return false;
    node.pieces.push(choice.text);
    $("text").insertBefore(piece(index, node.pieces.length - 1, choice.text), $("text").lastChild);
    return true;
  },
};
