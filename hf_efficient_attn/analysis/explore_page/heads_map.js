// The map of layers and heads: coloured by a measure, it chooses the head that the text shows.

const MEASURES = {
  span: { title: "learned span", text: tokensText },
  distance: { title: "mean distance", text: tokensText },
  effective: { title: "effective tokens", text: tokensText },
  first: { title: "on the first token", text: percent },
};
const model = data.model ? new ReadText(data.model) : null;
const chosen = { layer: 0, head: 0, ...model?.memberships?.first, place: 0 };

function setUpHeads() {
  element("measure").append(...measures().map(([name, { title }]) => make("option", { value: name }, title)));
  element("measure").addEventListener("change", showHeads);
  element("heads-map").addEventListener("keydown", stepHeads);
  element("shapes").textContent = model.memberships
    ? `Round cells: heads that select keys by ${model.memberships.kind}s.`
    : "";
  showHeads();
}

// What can be said of this model's heads.
function measures() {
  return Object.entries(MEASURES).filter(([name]) => name !== "span" || model.spans.length);
}

function tokensText(number) {
  return `${number < 100 ? number.toFixed(1) : count(number)} tokens`;
}

function showHeads() {
  const measure = element("measure").value;
  const [layers, heads] = [range(0, model.layers), range(0, model.heads)];
  const numbers = layers.map((layer) => heads.map((head) => model.ofHead(measure, layer, head)));
  // from 0 on, so that small differences look small
  const highest = Math.max(...numbers.flat());
  const level = (number) => (highest > 0 ? number / highest : 0);
  const { text } = MEASURES[measure];
  const axis = mapRow([make("span"), make("span", { className: "axis" }, "head")]);
  const names = mapRow(["layer", ...heads].map((name) => make("span", {}, name)));
  for (const row of [axis, names]) row.setAttribute("aria-hidden", "true");
  const rows = numbers.map((row, layer) => {
    const cells = row.map((number, head) => headCell(layer, head, text(number), level(number)));
    return mapRow([make("span", {}, layer), ...cells]);
  });
  element("heads-map").style.gridTemplateColumns = `32px repeat(${model.heads}, minmax(12px, 1fr))`;
  element("heads-map").replaceChildren(axis, names, ...rows);
  element("scale").replaceChildren(make("span", {}, 0), make("span", {}, text(highest)));
  showHeadFacts();
}

function mapRow(cells) {
  const row = make("div", { style: "display: contents" }, ...cells);
  row.setAttribute("role", "row");
  return row;
}

function headCell(layer, head, text, level) {
  const isChosen = layer === chosen.layer && head === chosen.head;
  const choices = model.memberships?.headText(layer, head);
  const title = `layer ${layer}, head ${head}: ${text}${choices ? `; ${choices}` : ""}`;
  const cell = make("button", { title, tabIndex: isChosen ? 0 : -1 });
  cell.setAttribute("role", "gridcell");
  cell.classList.toggle("chooses", Boolean(choices));
  cell.setAttribute("aria-label", title);
  cell.setAttribute("aria-selected", String(isChosen));
  cell.style.setProperty("--level", level);
  cell.addEventListener("click", () => chooseHead(layer, head));
  return cell;
}

function showHeadFacts() {
  const { layer, head } = chosen;
  const choices = model.memberships?.headText(layer, head);
  element("head-title").textContent = `Layer ${layer}, head ${head}${choices ? ` (${choices})` : ""}`;
  const facts = measures().map(([name, { title, text }]) => [title, text(model.ofHead(name, layer, head))]);
  fillList(element("head-facts"), facts);
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
