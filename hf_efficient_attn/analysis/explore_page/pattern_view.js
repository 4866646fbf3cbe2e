// The view of a pattern: what the controls say, and what is shown of it.

const state = { preset: null, patterns: [], tokens: data.tokens, layer: 0, head: 0 };
let isRibbonStale = true;
const matrix = new Matrix(element("matrix"), showToken, showPair);

function setUpPatternView() {
  for (const [index, preset] of data.presets.entries()) {
    element("preset").append(make("option", { value: index }, preset.title));
  }
  element("preset").addEventListener("change", () => choosePreset(Number(element("preset").value)));
  for (const id of ["layer", "head"]) element(id).addEventListener("change", readControls);
  element("token").addEventListener("change", () => matrix.goTo(inBounds(element("token"), 0, state.tokens - 1)));
  element("zoom-in").addEventListener("click", () => matrix.zoom(1.6));
  element("zoom-out").addEventListener("click", () => matrix.zoom(1 / 1.6));
  element("fit").addEventListener("click", () => matrix.fit());
  element("single").addEventListener("click", () => matrix.single());
  matrix.numTokens = data.tokens;
  matrix.token = Math.floor(data.tokens / 2);
  choosePreset(0);
}

function choosePreset(index) {
  const preset = data.presets[index];
  Object.assign(state, { preset, patterns: preset.patterns.map((parts) => new KeyIntervals(parts)) });
  element("preset").value = index;
  element("expression").textContent = preset.expressions.join("\n");
  element("size").textContent =
    `${count(state.tokens)} tokens, ${count(preset.layers)} layers, ${count(preset.heads)} heads` +
    `${preset.causal ? ", causal" : ""}.`;
  element("layer").value = element("head").value = 0;
  readControls();
}

function readControls() {
  state.layer = inBounds(element("layer"), 0, state.preset.layers - 1);
  state.head = inBounds(element("head"), 0, state.preset.heads - 1);
  for (const name of ["layer", "head"]) element(name).value = state[name];
  showPattern();
}

// The patterns of a layer, one for each group of heads that are alike.
function patternsOf(layer) {
  return state.preset.indices[layer % state.preset.indices.length].map((index) => state.patterns[index]);
}

function patternOf(layer, head) {
  const groups = patternsOf(layer);
  return groups[Math.floor(head / (state.preset.heads / groups.length))];
}

function showPattern() {
  const pattern = patternOf(state.layer, state.head);
  matrix.show(pattern, state.tokens);
  element("alike").textContent = alikeText();
  element("share").textContent = "counting …";
  fillList(element("counts"), []);
  element("overall").textContent = "";
  startJob("count", countPairs(pattern, state.tokens, showCounts));
  startJob("overall", countOverall());
  showBackend();
}

// The pairs of all layers and heads, where they differ; random blocks are as many in each.
function* countOverall() {
  const { preset, patterns, tokens } = state;
  if (preset.random || patterns.length === 1) return;
  let total = 0;
  const numPairs = [];
  for (const pattern of patterns) yield* countPairs(pattern, tokens, ({ pairs }) => numPairs.push(pairs));
  for (const layer of range(0, preset.layers)) {
    const groups = preset.indices[layer % preset.indices.length];
    for (const index of groups) total += numPairs[index] / groups.length;
  }
  element("overall").textContent =
    `${percent(total / preset.layers / tokens ** 2)} in all layers and heads together.`;
}

function alikeText() {
  const { expressions, random, heads } = state.preset;
  const parts = [];
  if (expressions.length > 1)
    parts.push(`Layer ${state.layer} follows line ${(state.layer % expressions.length) + 1}.`);
  const numGroups = patternsOf(state.layer).length;
  if (random) parts.push("Random blocks differ in each layer and head.");
  else if (numGroups > 1) parts.push(`Heads differ in groups of ${heads / numGroups}.`);
  return parts.join(" ");
}

// Which backend computes the pattern of the layer and why, as Python has estimated it.
function showBackend() {
  const { preset, tokens, layer } = state;
  const known = preset.backends[layer % preset.backends.length];
  const source = `Estimates of hf_efficient_attn ${data.version}; hf-efficient-attn bench attention measures times.`;
  element("backend").replaceChildren(
    ...known.map(backendBox),
    make("p", { className: "hint" }, `${known[0].call}, ${count(tokens)} tokens. ${source}`),
  );
}

function backendBox({ setting, backend, cost, baseline, memory, reasons }) {
  const times = cost < 1 ? `about ${percent(cost)} of` : `about ${cost.toFixed(1)} ×`;
  const lines = Object.entries(reasons).map(([name, reason]) => make("li", {}, `not ${name}: ${reason}`));
  return make(
    "div",
    { className: "backend" },
    make("b", {}, backend),
    setting,
    make("p", { className: "hint" }, `${times} the time of ${baseline}, ${memory}`),
    make("details", { className: "hint" }, make("summary", {}, "why no other backend"), make("ul", {}, ...lines)),
  );
}

function showCounts({ pairs, fewest, most, isCausal }) {
  const { tokens } = state;
  const [all, before] = [tokens * tokens, (tokens * (tokens + 1)) / 2];
  element("share").textContent = `${percent(pairs / all)} of all pairs`;
  element("share-bar").style.width = `${(100 * pairs) / all}%`;
  const rows = [
    ["pairs", `${count(pairs)} of ${count(all)}`],
    ["keys per token", `${count(pairs / tokens)} on average, ${count(fewest)} to ${count(most)}`],
  ];
  if (isCausal) rows.splice(1, 0, ["of causal", `${percent(pairs / before)} of the pairs of causal attention`]);
  if (!fewest) rows.push(["note", "Some tokens attend to nothing: their attention output is zero."]);
  fillList(element("counts"), rows);
}

function showPair(pair) {
  const where = element("where");
  if (!pair || pair.key === null) {
    where.textContent = pair ? `token ${count(pair.query)}` : "Rows are queries, columns are keys. Click a row to see which keys it attends to.";
    return;
  }
  const { query, key } = pair;
  const reads = matrix.pattern.keys(query, key, key + 1).length > 0;
  where.textContent = `token ${count(query)} ${reads ? "■ attends to" : "⬚ does not attend to"} token ${count(key)}`;
}

function showToken(token) {
  const { tokens } = state;
  const { pattern, keys } = matrix;
  state.readers = null;
  element("token").value = token;
  element("summary").textContent = `Token ${count(token)} attends to ${count(sizeOf(keys))} of ${count(tokens)} tokens.`;
  showReads(keys);
  startJob(
    "readers",
    findReaders(pattern, token, tokens, (readers) => {
      state.readers = readers;
      matrix.setReadBy(readers);
      showReads(keys);
    }),
  );
  element("reach").replaceChildren();
  startJob("reach", findReach(patternsOf, state.preset.layers, token, tokens, showReach));
}

function showReads(keys) {
  const { readers } = state;
  fillList(element("reads"), [
    ["attends to", intervalsText(keys)],
    ["attended to by", readers ? `${count(sizeOf(readers))} tokens: ${intervalsText(readers)}` : "looking …"],
  ]);
  isRibbonStale = true;
  requestRedraw();
}

function showReach(layers, reached) {
  const share = reached / state.tokens;
  const fill = make("i");
  fill.style.width = `${100 * share}%`;
  const text = share === 1 ? "all tokens" : `${count(reached)} · ${percent(share)}`;
  const name = `${layers} layer${layers > 1 ? "s" : ""}`;
  element("reach").append(
    make("li", {}, make("span", {}, name), make("span", { className: "bar" }, fill), make("span", {}, text)),
  );
}

function drawRibbon() {
  const canvas = element("ribbon");
  if (!canvas.clientWidth || !isRibbonStale) return;
  isRibbonStale = false;
  const context = contextOf(canvas);
  const colors = colorsOf("--line", "--reads", "--read-by", "--ink");
  const [width, middle] = [canvas.clientWidth, canvas.clientHeight / 2];
  const scale = width / state.tokens;
  context.fillStyle = colors["--line"];
  context.fillRect(0, middle - 0.5, width, 1);
  context.fillStyle = colors["--reads"];
  fillIntervals(matrix.keys, 0, scale, width, (at, length) => context.fillRect(at, 6, length, middle - 8));
  context.fillStyle = colors["--read-by"];
  fillIntervals(state.readers || [], 0, scale, width, (at, length) =>
    context.fillRect(at, middle + 2, length, middle - 8),
  );
  context.fillStyle = colors["--ink"];
  context.fillRect(Math.min(width - 2, (matrix.token + 0.5) * scale - 1), 0, 2, 2 * middle);
}
