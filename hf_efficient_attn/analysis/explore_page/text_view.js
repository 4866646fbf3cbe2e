// The view of a model on a text: the text with what a token reads in the chosen head, and the strongest weights.

// a weight from which on, or from the largest, a token has the full colour: heads that read much evenly look pale
const FULL_WEIGHT = 0.05;
// beside the token, in the lower strip
const NEAR_TOKENS = 64;
// of a strip, in pixels: its title above, and below its line the tokens that share a cluster or bucket
const TITLE_HEIGHT = 15;
const MATES_HEIGHT = 5;

function setUpTextView() {
  element("model-name").textContent = model.name;
  const measured = `weights are kept for the ${count(model.rows.length)} underlined tokens, which can be clicked`;
  const read = `${count(model.tokens.length)} tokens; ${measured}.`;
  const leftOut = model.left_out ? ` The text has ${count(model.left_out)} more tokens, which are left out.` : "";
  element("model-facts").textContent = `${model.kind}. ${read}${leftOut}`;
  element("model-notes").textContent = [...model.notes, globalText()].join(" ");
  setUpHeads();
  fillText();
  element("text").addEventListener("click", (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined) chooseToken(Number(token));
  });
  element("text").addEventListener("pointerover", nameToken);
  element("text").addEventListener("keydown", stepRows);
  element("row-before").addEventListener("click", () => chooseRow(chosen.place - 1));
  element("row-after").addEventListener("click", () => chooseRow(chosen.place + 1));
  chosen.place = Math.floor(model.rows.length / 2);
}

// Samples of the marks in the text.
function showLegend() {
  const marks = [["read", "it attends to; darker means more weight"]];
  const of = model.memberships?.of(chosen.layer, chosen.head);
  if (of) marks.push(["mate", `in the same ${of.kind}`]);
  marks.push(["measured", "underlined: click it to see what it attends to; other tokens cannot be chosen"]);
  if (model.isGlobal.size) marks.push(["global", "global"]);
  const samples = marks.flatMap(([className, text]) => [make("span", { className }, text), " "]);
  element("text-legend").replaceChildren(...samples);
}

// The tip of a token is written when a pointer comes to it.
function nameToken({ target }) {
  if (target.dataset?.token === undefined) return;
  const token = Number(target.dataset.token);
  const said = model.memberships?.tokenText(chosen.layer, chosen.head, token);
  target.title = `token ${count(token)}${said ? `: ${said}` : ""}`;
}

function globalText() {
  const shown = model.global_tokens.slice(0, 8).map((token) => `${count(token)} “${model.word(token)}”`);
  const more = model.global_tokens.length - shown.length;
  if (!shown.length) return "";
  return `Global tokens (line above): ${shown.join(", ")}${more > 0 ? ` and ${count(more)} more` : ""}.`;
}

// The text in pieces, which the browser lays out only where they are seen; they end with a line where they can. Tokens
// are texts, never HTML.
function fillText() {
  let piece = make("div");
  element("text").append(piece);
  for (const [token, text] of model.tokens.entries()) {
    const isSpecial = model.isSpecial.has(token);
    const span = make("span", { id: `token-${token}` }, isSpecial ? ` ${text} ` : text);
    span.dataset.token = token;
    span.classList.toggle("special", isSpecial);
    span.classList.toggle("measured", model.places.has(token));
    span.classList.toggle("global", model.isGlobal.has(token));
    piece.append(span);
    const size = piece.childElementCount;
    if (size >= MOST_TOKENS || (size >= PIECE_TOKENS && text.endsWith("\n"))) {
      piece = make("div");
      element("text").append(piece);
    }
  }
}

function stepRows(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chooseRow(chosen.place + step);
}

function chooseToken(token) {
  const place = model.places.get(token);
  if (place === undefined) {
    element("row-title").textContent =
      `Only underlined tokens can be clicked. To include token ${count(token)} “${model.word(token)}”, add --rows ${token}.`;
    return;
  }
  chosen.place = place;
  showRow();
}

function chooseRow(place) {
  chosen.place = Math.max(0, Math.min(model.rows.length - 1, place));
  showRow();
  scrollToToken(model.rows[chosen.place]);
}

// Bring a token of the text into view.
function scrollToToken(token) {
  element(`token-${token}`).scrollIntoView({ block: "center" });
}

function showRow() {
  const { layer, head, place } = chosen;
  const row = model.rows[place];
  const found = model.strongest(layer, head, place);
  const at = model.at(layer, head, place);
  const numRead = model.num_read[at];
  const marked = element("text").querySelectorAll(".read, .mate, .chosen");
  marked.forEach((span) => span.classList.remove("read", "mate", "chosen"));
  const largest = found.length ? found[0].weight : 1;
  for (const { key, weight } of found) {
    const span = element(`token-${key}`);
    span.classList.add("read");
    span.style.setProperty("--weight", Math.sqrt(weight / Math.max(largest, FULL_WEIGHT)));
  }
  element(`token-${row}`).classList.add("chosen");
  showLegend();
  chosen.mates = showMembership(found);
  for (const key of chosen.mates) element(`token-${key}`).classList.add("mate");
  const said = model.memberships?.tokenText(layer, head, row);
  element("row-title").textContent =
    `Token ${count(row)} “${model.word(row)}” attends to ${count(numRead)} tokens in layer ${layer}, head ${head}` +
    `${said ? `: ${said}` : ""}.`;
  element("row-title").title = element("row-title").textContent;
  element("read-title").textContent = found.length ? "It attends to, strongest first" : "It attends to nothing";
  const rest = numRead - found.length;
  const others =
    rest > 0 ? ` The other ${count(rest)} together have ${percent(1 - model.share[at])} and are not in this page.` : "";
  element("read-facts").textContent = found.length
    ? `These ${found.length} have ${percent(model.share[at])} of its weight.${others}`
    : "";
  element("read-table").tBodies[0].replaceChildren(...found.map((each) => readLine(each, row, largest)));
  requestRedraw();
}

function readLine({ key, weight }, row, largest) {
  const away = key === row ? "itself" : `${count(key)} (${key > row ? "+" : "−"}${count(Math.abs(key - row))})`;
  const share = make("td", {}, percent(weight));
  share.style.setProperty("--share", `${(100 * weight) / largest}%`);
  const line = make("tr", { tabIndex: 0 }, make("td", {}, model.word(key)), make("td", {}, away), share);
  line.dataset.key = key;
  line.addEventListener("click", () => scrollToToken(key));
  line.addEventListener("keydown", (event) => event.key === "Enter" && scrollToToken(key));
  return line;
}

// Above, the weights along the whole text; below, those near the token. A bar is as high as its share of the largest;
// marks under the line are tokens that share a cluster or bucket with the token.
function drawTextRibbon() {
  const canvas = element("text-ribbon");
  if (!canvas.clientWidth) return;
  const context = contextOf(canvas);
  const colors = colorsOf("--line", "--cell", "--reads", "--read-by", "--soft");
  const row = model.rows[chosen.place];
  const found = model.strongest(chosen.layer, chosen.head, chosen.place);
  const height = canvas.clientHeight / 2;
  const most = found.length ? `, the highest bar is ${percent(found[0].weight)}` : "";
  const strips = [
    { first: 0, last: model.tokens.length, title: `the whole text${most}` },
    { first: row - NEAR_TOKENS, last: row + NEAR_TOKENS + 1, title: `${NEAR_TOKENS} tokens before and after` },
  ];
  strips.forEach((strip, index) => drawStrip(context, colors, { ...strip, row, found, top: index * height, height }));
}

function drawStrip(context, colors, { first, last, title, row, found, top, height }) {
  const width = context.canvas.clientWidth;
  const scale = width / (last - first);
  const bottom = top + height - MATES_HEIGHT - 2;
  context.fillStyle = colors["--soft"];
  context.font = "11px system-ui, sans-serif";
  context.fillText(title, 6, top + 10);
  context.fillStyle = colors["--read-by"];
  for (const key of chosen.mates) {
    if (key < first || key >= last) continue;
    context.fillRect((key - first) * scale, bottom + 2, Math.max(1, scale - 1), MATES_HEIGHT - 2);
  }
  context.fillStyle = colors["--line"];
  context.fillRect(0, bottom, width, 1);
  context.fillStyle = colors["--reads"];
  context.fillRect((row + 0.5 - first) * scale - 1, top + TITLE_HEIGHT, 2, height - TITLE_HEIGHT);
  context.fillStyle = colors["--cell"];
  for (const { key, weight } of found) {
    if (key < first || key >= last) continue;
    const tall = Math.max(2, (bottom - top - TITLE_HEIGHT) * (weight / found[0].weight));
    context.fillRect((key - first) * scale, bottom - tall, Math.max(2, scale - 1), tall);
  }
}
