// Which backend computes the pattern and why, as Python has said when the page was written; nothing is estimated here.

function showBackend(shown) {
  const text = shown.lines[shown.layer % shown.lines.length];
  const known = data.explanations.filter(
    (each) => each.expression === text && each.tokens === shown.tokens && each.causal === shown.causal,
  );
  if (known.length && shown.heads === data.heads) {
    element("backend").replaceChildren(
      ...known.map(explanationBox),
      make(
        "p",
        { className: "hint" },
        `${known[0].call}. Estimates of hf_efficient_attn ${data.version}; hf-efficient-attn bench attention measures.`,
      ),
    );
    return;
  }
  element("backend").replaceChildren(
    make("p", { className: "hint" }, "Python says it for this pattern and length:"),
    make("pre", {}, explainCommand(shown, text)),
  );
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
