// What both views of the page need: elements, numbers, texts.

const data = JSON.parse(document.getElementById("data").textContent);

function element(id) {
  return document.getElementById(id);
}

// A new element with these properties; children are elements or texts, which stay texts.
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function count(number) {
  return Math.round(number).toLocaleString("en");
}

function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01%";
  if (share < 1 && share > 0.9999) return "> 99.99%";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)}%`;
}

function fillList(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

// Fit the pixels of a canvas to its size on the page; returns a cleared context in units of the page.
function contextOf(canvas) {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function inBounds(input, least, most) {
  const value = Math.floor(Number(input.value));
  return Number.isFinite(value) ? Math.max(least, Math.min(most, value)) : least;
}

// The intervals as text: the first few of them, and how many more there are.
function intervalsText(intervals, most = 8) {
  const shown = [];
  for (let i = 0; i < Math.min(intervals.length, 2 * most); i += 2) {
    const last = intervals[i + 1] - 1;
    shown.push(intervals[i] === last ? count(last) : `${count(intervals[i])}–${count(last)}`);
  }
  const more = intervals.length / 2 - shown.length;
  return (shown.join(", ") || "none") + (more > 0 ? ` and ${count(more)} more such ranges` : "");
}
