// The view of a model on a text: heads to choose from, the text with what a token reads, the strongest weights.

const MEASURES = {
  span: { title: "learned span", text: tokensText },
  distance: { title: "mean distance", text: tokensText },
  effective: { title: "tokens in effect", text: tokensText },
  first: { title: "on the first token", text: percent },
};
// a weight from which on, or from the largest, a token has the full colour: heads that read much evenly look pale
const FULL_WEIGHT = 0.05;
// beside the token, in the lower strip
const NEAR_TOKENS = 64;
const model = data.model ? new ReadText(data.model) : null;
const chosen = { layer: 0, head: 0, place: 0 };

function setUpTextView() {
  element("model-name").textContent = model.name;
  const read = `${count(model.tokens.length)} tokens, of which ${count(model.rows.length)} are measured (underlined).`;
  const leftOut = model.left_out ? ` The text has ${count(model.left_out)} more, which are not read.` : "";
  element("model-facts").textContent = `${model.kind}. ${read}${leftOut}`;
  element("model-notes").textContent = [...model.notes, globalText()].join(" ");
  const measures = Object.entries(MEASURES).filter(([name]) => name !== "span" || model.spans.length);
  element("measure").append(...measures.map(([name, { title }]) => make("option", { value: name }, title)));
  element("measure").addEventListener("change", showHeads);
  fillText();
  element("text").addEventListener("click", (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined) chooseToken(Number(token));
  });
  element("text").addEventListener("keydown", stepRows);
  element("row-before").addEventListener("click", () => chooseRow(chosen.place - 1));
  element("row-after").addEventListener("click", () => chooseRow(chosen.place + 1));
  element("heads-map").addEventListener("keydown", stepHeads);
  chosen.place = Math.floor(model.rows.length / 2);
  showHeads();
}

function tokensText(number) {
  return `${number < 100 ? number.toFixed(1) : count(number)} tokens`;
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
    const span = make("span", { id: `token-${token}`, title: `token ${count(token)}` }, isSpecial ? ` ${text} ` : text);
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

function showHeads() {
  const measure = element("measure").value;
  const map = element("heads-map");
  const numbers = range(0, model.layers).map((layer) => range(0, model.heads).map((head) => model.ofHead(measure, layer, head)));
  const [lowest, highest] = [Math.min(...numbers.flat()), Math.max(...numbers.flat())];
  const { text } = MEASURES[measure];
  map.style.gridTemplateColumns = `28px repeat(${model.heads}, minmax(12px, 1fr))`;
  const heading = make("div", { style: "display: contents" }, make("span", {}, ""), ...range(0, model.heads).map((head) => make("span", {}, head)));
  const rows = numbers.map((row, layer) => {
    const cells = row.map((number, head) => {
      const isChosen = layer === chosen.layer && head === chosen.head;
      const label = `layer ${layer}, head ${head}: ${text(number)}`;
      const cell = make("button", { title: label, tabIndex: isChosen ? 0 : -1, role: "gridcell", ariaLabel: label, ariaSelected: String(isChosen) });
      cell.style.setProperty("--level", highest > lowest ? (number - lowest) / (highest - lowest) : 0);
      cell.addEventListener("click", () => chooseHead(layer, head));
      return cell;
    });
    return make("div", { role: "row", style: "display: contents" }, make("span", {}, layer), ...cells);
  });
  heading.setAttribute("aria-hidden", "true");
  map.replaceChildren(heading, ...rows);
  element("scale").replaceChildren(make("span", {}, text(lowest)), make("span", {}, text(highest)));
  element("head-title").textContent = `Layer ${chosen.layer}, head ${chosen.head}`;
  const facts = Object.entries(MEASURES).filter(([name]) => name !== "span" || model.spans.length);
  fillList(element("head-facts"), facts.map(([name, { title, text: write }]) => [title, write(model.ofHead(name, chosen.layer, chosen.head))]));
}

function chooseHead(layer, head) {
  chosen.layer = Math.max(0, Math.min(model.layers - 1, layer));
  chosen.head = Math.max(0, Math.min(model.heads - 1, head));
  showHeads();
  showRow();
}

function stepHeads(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!steps[event.key]) return;
  event.preventDefault();
  chooseHead(chosen.layer + steps[event.key][0], chosen.head + steps[event.key][1]);
  element("heads-map").querySelector('[aria-selected="true"]').focus();
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
    element("row-title").textContent = `Token ${count(token)} “${model.word(token)}” is not measured. Write the page with --rows ${token}.`;
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
  for (const span of element("text").querySelectorAll(".read, .chosen")) span.classList.remove("read", "chosen", "strong");
  const largest = found.length ? found[0].weight : 1;
  for (const { key, weight } of found) {
    const span = element(`token-${key}`);
    span.classList.add("read");
    const level = Math.sqrt(weight / Math.max(largest, FULL_WEIGHT));
    span.classList.toggle("strong", level > 0.7);
    span.style.setProperty("--weight", level);
  }
  element(`token-${row}`).classList.add("chosen");
  element("row-title").textContent = `Token ${count(row)} “${model.word(row)}” reads ${count(numRead)} tokens in layer ${layer}, head ${head}.`;
  element("read-title").textContent = found.length ? "It reads, the strongest first" : "It reads nothing";
  const rest = numRead - found.length;
  const others = rest > 0 ? ` The other ${count(rest)} have ${percent(1 - model.share[at])} together and are not in this page.` : "";
  element("read-facts").textContent = found.length ? `These ${found.length} have ${percent(model.share[at])} of its weight.${others}` : "";
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

// Above, the weights along the whole text; below, those near the token. A bar is as high as its share of the largest.
function drawTextRibbon() {
  const canvas = element("text-ribbon");
  if (!canvas.clientWidth) return;
  const context = contextOf(canvas);
  const colors = colorsOf("--line", "--cell", "--reads", "--soft");
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
  const bottom = top + height - 3;
  context.fillStyle = colors["--soft"];
  context.font = "11px system-ui, sans-serif";
  context.fillText(title, 0, top + 10);
  context.fillStyle = colors["--line"];
  context.fillRect(0, bottom, width, 1);
  context.fillStyle = colors["--reads"];
  context.fillRect((row + 0.5 - first) * scale - 1, top + 2, 2, height - 2);
  context.fillStyle = colors["--cell"];
  for (const { key, weight } of found) {
    if (key < first || key >= last) continue;
    const tall = Math.max(2, (height - 6) * (weight / found[0].weight));
    context.fillRect((key - first) * scale, bottom - tall, Math.max(2, scale - 1), tall);
  }
}
