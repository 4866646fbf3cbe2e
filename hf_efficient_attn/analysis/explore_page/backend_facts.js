// Which backend computes the pattern and why, as Python has said when the page was written; nothing is estimated here.

function showBackend(shown) {
  const text = shown.lines[shown.layer % shown.lines.length];
  const ofPattern = data.explanations.filter(
    (each) => each.expression === text && each.causal === shown.causal && shown.heads === data.heads,
  );
  const tokens = nearest(ofPattern.map((each) => each.tokens), shown.tokens);
  const known = ofPattern.filter((each) => each.tokens === tokens);
  const parts = known.map(explanationBox);
  if (known.length) {
    const measured = `Estimates of hf_efficient_attn ${data.version}; hf-efficient-attn bench attention measures.`;
    parts.push(make("p", { className: "hint" }, `${known[0].call}, ${count(tokens)} tokens. ${measured}`));
  }
  if (tokens !== shown.tokens) {
    const what = known.length ? "Not this length, but the nearest that is known here" : "Not known here";
    parts.unshift(
      make("p", { className: "hint" }, `${what}. Python says it for this pattern and length:`),
      make("pre", {}, explainCommand(shown, text)),
    );
  }
  element("backend").replaceChildren(...parts);
}

// The nearest by ratio; undefined of none.
function nearest(lengths, wanted) {
  const distance = (length) => Math.abs(Math.log(length / wanted));
  return [...lengths].sort((one, other) => distance(one) - distance(other))[0];
}

function explanationBox({ setting, backend, cost, baseline, memory, reasons }) {
  const times = cost < 1 ? `about ${percent(cost)} of` : `about ${cost.toFixed(1)} ×`;
  const lines = Object.entries(reasons).map(([name, reason]) => make("li", {}, `not ${name}: ${reason}`));
  return make(
    "div",
    { className: "backend" },
    make("b", {}, backend),
    setting,
    make("p", { className: "hint" }, `${times} the time of ${baseline}, ${memory}`),
    make("details", { className: "hint" }, make("summary", {}, "why not another"), make("ul", {}, ...lines)),
  );
}

// In a shell, ' within '...' is written '\''.
function explainCommand(shown, text) {
  const options = [`--tokens ${shown.tokens}`, `--heads ${shown.heads}`];
  if (shown.causal) options.push("--causal");
  if (shown.layer) options.push(`--layer ${shown.layer}`);
  return `hf-efficient-attn explain '${text.replaceAll("'", "'\\''")}' ${options.join(" ")}`;
}
