// The view of a pattern: what the controls say, and what is shown of it.

const state = { lines: [], patterns: [], tokens: 1, layers: 1, heads: 1, layer: 0, head: 0, causal: false };
let isRibbonStale = true;
const matrix = new Matrix(element("matrix"), showToken, showPair);

function setUpPatternView() {
  for (const [index, preset] of data.presets.entries()) {
    element("preset").append(make("option", { value: index }, preset.title));
  }
  element("preset").append(make("option", { value: "", hidden: true }, "your own"));
  element("lengths").append(...data.lengths.map((length) => make("option", { value: length })));
  element("syntax").append(...syntaxLines().map((line) => make("li", {}, line)));
  element("preset").addEventListener("change", () => choosePreset(Number(element("preset").value)));
  element("expression").addEventListener("input", () => {
    element("preset").value = "";
    readControls();
  });
  for (const id of ["tokens", "layers", "heads", "layer", "head", "causal"]) {
    element(id).addEventListener("change", readControls);
  }
  element("token").addEventListener("change", () => matrix.goTo(inBounds(element("token"), 0, state.tokens - 1)));
  element("zoom-in").addEventListener("click", () => matrix.zoom(1.6));
  element("zoom-out").addEventListener("click", () => matrix.zoom(1 / 1.6));
  element("fit").addEventListener("click", () => matrix.fit());
  element("single").addEventListener("click", () => matrix.single());
  for (const [name, most] of Object.entries(data.most)) element(name).max = most;
  element("tokens").value = data.tokens;
  matrix.numTokens = data.tokens;
  matrix.token = Math.floor(data.tokens / 2);
  choosePreset(0);
}

function syntaxLines() {
  const lines = Object.entries(KINDS).map(([kind, [, fields]]) => {
    const name = kind === "global_tokens" ? "global" : kind;
    return `${name}(${fields.map(([field]) => field).join(", ")})`;
  });
  return [...lines, "a | b", "a & b", "~a"];
}

function choosePreset(index) {
  const preset = data.presets[index];
  element("preset").value = index;
  element("expression").value = preset.expressions.join("\n");
  element("layers").value = preset.layers;
  element("heads").value = preset.heads;
  element("layer").value = 0;
  element("head").value = 0;
  element("causal").checked = preset.causal;
  readControls();
}

// Take over what the controls say; a problem is shown, and the page stays as it was.
function readControls() {
  const next = {
    lines: element("expression")
      .value.split("\n")
      .map((line) => line.trim())
      .filter(Boolean),
    tokens: inBounds(element("tokens"), 1, data.most.tokens),
    layers: inBounds(element("layers"), 1, data.most.layers),
    heads: inBounds(element("heads"), 1, data.most.heads),
    causal: element("causal").checked,
    resolved: new Map(),
  };
  next.layer = inBounds(element("layer"), 0, next.layers - 1);
  next.head = inBounds(element("head"), 0, next.heads - 1);
  try {
    if (!next.lines.length) throw new PatternError("Type a pattern, e.g. band(4, 4) | global(0).");
    next.patterns = next.lines.map((line) => (next.causal ? parsePattern(line).causal() : parsePattern(line)));
    // what cannot be laid over this length is refused before anything is drawn
    next.patterns.forEach((pattern, layer) => resolved(next, layer));
  } catch (error) {
    showProblem(error);
    return;
  }
  showProblem(null);
  Object.assign(state, next);
  for (const name of ["tokens", "layers", "heads", "layer", "head"]) element(name).value = state[name];
  showPattern();
}

// The pattern of a layer and a head; kept, since random blocks take a while to draw.
function resolved(of, layer, head = of.head) {
  const name = `${layer}/${head}`;
  if (!of.resolved.has(name)) {
    const place = { numKeys: of.tokens, layer, head, numHeads: of.heads };
    of.resolved.set(name, of.patterns[layer % of.patterns.length].resolve(place));
  }
  return of.resolved.get(name);
}

function showProblem(error) {
  if (error && !(error instanceof PatternError)) throw error;
  element("problem").textContent = error ? error.message : "";
  element("expression").setAttribute("aria-invalid", String(Boolean(error)));
  // what is still shown is the last pattern that could be read
  element("pattern-view").classList.toggle("outdated", Boolean(error));
}

// Do work on the pattern in slices; random blocks may be refused only when they are drawn.
function* checked(work) {
  try {
    yield* work;
  } catch (error) {
    showProblem(error);
  }
}

function showPattern() {
  const pattern = resolved(state, state.layer);
  matrix.show(pattern, state.tokens);
  element("alike").textContent = alikeText();
  element("share").textContent = "counting …";
  fillList(element("counts"), []);
  element("overall").textContent = "";
  startJob("count", checked(countPairs(pattern, state.tokens, showCounts)));
  startJob("overall", checked(countOverall()));
  showBackend(state);
}

// The pairs of all layers and heads, where they differ; random blocks are as many in each.
function* countOverall() {
  const { patterns, tokens, layers, heads } = state;
  const numGroups = patterns.map((pattern) => pattern.numHeadPatterns);
  if (patterns.some((pattern) => pattern.isRandom) || (patterns.length === 1 && numGroups[0] === 1)) return;
  let total = 0;
  for (const [line, groups] of numGroups.entries()) {
    const numLayers = range(0, layers).filter((layer) => layer % patterns.length === line).length;
    for (const group of numLayers ? range(0, groups) : []) {
      const pattern = resolved(state, line, (group * heads) / groups);
      yield* countPairs(pattern, tokens, ({ pairs }) => (total += (pairs * numLayers) / groups));
    }
  }
  element("overall").textContent = `${percent(total / layers / tokens ** 2)} in all layers and heads together.`;
}

function alikeText() {
  const pattern = state.patterns[state.layer % state.patterns.length];
  const parts = [];
  if (state.lines.length > 1)
    parts.push(`Layer ${state.layer} follows line ${(state.layer % state.lines.length) + 1}.`);
  if (pattern.isRandom) parts.push("Random blocks differ in each layer and head.");
  if (pattern.numHeadPatterns > 1) parts.push(`Heads differ in groups of ${state.heads / pattern.numHeadPatterns}.`);
  return parts.join(" ");
}

function showCounts({ pairs, fewest, most, isCausal }) {
  const { tokens } = state;
  const [all, before] = [tokens * tokens, (tokens * (tokens + 1)) / 2];
  element("share").textContent = `${percent(pairs / all)} of all pairs`;
  element("share-bar").style.width = `${(100 * pairs) / all}%`;
  const rows = [
    ["pairs", `${count(pairs)} of ${count(all)}`],
    ["a token reads", `${count(pairs / tokens)} on average, ${count(fewest)} to ${count(most)}`],
  ];
  if (isCausal) rows.splice(1, 0, ["of causal", `${percent(pairs / before)} of what causal attention reads`]);
  if (!fewest) rows.push(["note", "Some tokens read nothing: their attention output is zero."]);
  fillList(element("counts"), rows);
}

function showPair(pair) {
  const where = element("where");
  if (!pair || pair.key === null) {
    where.textContent = pair ? `token ${count(pair.query)}` : "Rows read columns. Click a token to see what it reads.";
    return;
  }
  const { query, key } = pair;
  const reads = matrix.pattern.keys(query, query, key, key + 1).length > 0;
  where.textContent = `token ${count(query)} ${reads ? "■ reads" : "⬚ does not read"} token ${count(key)}`;
}

function showToken(token) {
  const { tokens } = state;
  const { pattern, keys } = matrix;
  state.readers = null;
  element("token").value = token;
  element("summary").textContent = `Token ${count(token)} reads ${count(sizeOf(keys))} of ${count(tokens)} tokens.`;
  showReads(keys);
  startJob(
    "readers",
    checked(
      findReaders(pattern, token, tokens, (readers) => {
        state.readers = readers;
        matrix.setReadBy(readers);
        showReads(keys);
      }),
    ),
  );
  element("reach").replaceChildren();
  startJob("reach", checked(findReach(patternsOfHeads, state.layers, token, tokens, showReach)));
}

// The patterns of a layer's heads, one for each group of heads that are alike.
function patternsOfHeads(layer) {
  const pattern = state.patterns[layer % state.patterns.length];
  const numGroups = pattern.isRandom ? state.heads : pattern.numHeadPatterns;
  return range(0, numGroups).map((group) => resolved(state, layer, (group * state.heads) / numGroups));
}

function showReads(keys) {
  const { readers } = state;
  fillList(element("reads"), [
    ["reads", intervalsText(keys)],
    ["read by", readers ? `${count(sizeOf(readers))} tokens: ${intervalsText(readers)}` : "looking …"],
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
