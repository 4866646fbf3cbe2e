// Start the page. What tests and the curious may call is in `window.explore`.

function drawAll() {
  if (!element("pattern-view").hidden) {
    matrix.draw();
    drawRibbon();
  }
  if (data.model) drawTextRibbon();
}

function chooseView(name) {
  for (const each of ["pattern", "text"]) {
    const isChosen = each === name;
    element(`${each}-view`).hidden = !isChosen;
    element(`tab-${each}`).setAttribute("aria-selected", String(isChosen));
    element(`tab-${each}`).tabIndex = isChosen ? 0 : -1;
  }
  requestRedraw();
}

setUpPatternView();
if (data.model) {
  element("views").hidden = false;
  for (const [name, other] of [
    ["pattern", "text"],
    ["text", "pattern"],
  ]) {
    const tab = element(`tab-${name}`);
    tab.addEventListener("click", () => chooseView(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      chooseView(other);
      element(`tab-${other}`).focus();
    });
  }
  setUpTextView();
  chooseView("text");
  chooseRow(chosen.place);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showPattern);
addEventListener("resize", () => {
  isRibbonStale = true;
  requestRedraw();
});
window.explore = { KeyIntervals, matrix, state, jobs, data, patternOf };
