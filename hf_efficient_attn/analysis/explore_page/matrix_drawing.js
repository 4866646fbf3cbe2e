// How the matrix is drawn: tiles, grid, the row and the column of the chosen token, axes.

Matrix.prototype.draw = function () {
  if (!this.tiles) return;
  const { canvas, view, room, numTokens } = this;
  const ratio = devicePixelRatio;
  const context = canvas.getContext("2d");
  const colors = colorsOf("--paper", "--panel", "--line", "--soft", "--ink", "--reads", "--read-by", "--mark");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colors["--paper"];
  context.fillRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  const width = Math.min(room.width, (numTokens - view.x) * view.scale);
  const height = Math.min(room.height, (numTokens - view.y) * view.scale);
  context.save();
  context.translate(MARGIN.left, MARGIN.top);
  context.beginPath();
  context.rect(0, 0, width, height);
  context.clip();
  context.fillStyle = colors["--panel"];
  context.fillRect(0, 0, width, height);
  this.drawTiles(context, width, height);
  if (view.scale >= GRID_SCALE) this.drawGrid(context, colors, width, height);
  this.drawToken(context, colors, width, height);
  context.restore();
  context.strokeStyle = colors["--line"];
  context.strokeRect(MARGIN.left - 0.5, MARGIN.top - 0.5, width + 1, height + 1);
  this.drawAxes(context, colors, width, height);
};

Matrix.prototype.drawTiles = function (context, width, height) {
  const ratio = devicePixelRatio;
  context.save();
  context.scale(1 / ratio, 1 / ratio);
  const view = { ...this.view, scale: this.view.scale * ratio };
  this.tiles.draw(context, view, width * ratio, height * ratio);
  context.restore();
};

Matrix.prototype.drawGrid = function (context, colors, width, height) {
  const { x, y, scale } = this.view;
  context.strokeStyle = colors["--line"];
  context.lineWidth = 1;
  context.beginPath();
  for (let key = Math.ceil(x); (key - x) * scale < width; key++) {
    context.moveTo(Math.round((key - x) * scale) + 0.5, 0);
    context.lineTo(Math.round((key - x) * scale) + 0.5, height);
  }
  for (let query = Math.ceil(y); (query - y) * scale < height; query++) {
    context.moveTo(0, Math.round((query - y) * scale) + 0.5);
    context.lineTo(width, Math.round((query - y) * scale) + 0.5);
  }
  context.stroke();
};

// The row of the chosen token with what it reads, and its column with what reads it; thick enough to be seen.
Matrix.prototype.drawToken = function (context, colors, width, height) {
  const { view, token, keys, readBy } = this;
  const thickness = Math.max(3, view.scale);
  const shift = (thickness - view.scale) / 2;
  const [left, top] = [(token - view.x) * view.scale - shift, (token - view.y) * view.scale - shift];
  context.fillStyle = colors["--mark"];
  context.fillRect(0, top, width, thickness);
  context.fillRect(left, 0, thickness, height);
  context.fillStyle = colors["--read-by"];
  fillIntervals(readBy || [], view.y, view.scale, height, (at, length) =>
    context.fillRect(left, at, thickness, length),
  );
  context.fillStyle = colors["--reads"];
  fillIntervals(keys, view.x, view.scale, width, (at, length) => context.fillRect(at, top, length, thickness));
};

// Call `fill(start, length)` in pixels for the intervals that are in view; what would be invisible is made a pixel.
function fillIntervals(intervals, origin, scale, pixels, fill) {
  let filled = -Infinity;
  for (let i = 0; i < intervals.length; i += 2) {
    const start = (intervals[i] - origin) * scale;
    const stop = Math.max(start + 1, (intervals[i + 1] - origin) * scale);
    if (stop <= filled + 0.5 || stop < 0) continue;
    if (start > pixels) return;
    fill(Math.max(start, -1), Math.min(stop, pixels + 1) - Math.max(start, -1));
    filled = stop;
  }
}

Matrix.prototype.drawAxes = function (context, colors, width, height) {
  const { view, numTokens, token } = this;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colors["--soft"];
  context.textBaseline = "middle";
  const near = (position, step) => Math.abs(position - token) * view.scale < 14 * Math.max(1, String(step).length / 3);
  const inside = (at, pixels) => at >= 0 && at <= pixels;
  const step = niceStep(70 / view.scale);
  for (let key = Math.ceil(view.x / step) * step; key < numTokens; key += step) {
    const at = (key + 0.5 - view.x) * view.scale;
    if (!inside(at, width)) break;
    context.textAlign = at < 20 ? "left" : "center";
    context.fillText(key.toLocaleString("en"), MARGIN.left + at, 15);
  }
  const down = niceStep(34 / view.scale);
  context.textAlign = "right";
  for (let query = Math.ceil(view.y / down) * down; query < numTokens; query += down) {
    const at = (query + 0.5 - view.y) * view.scale;
    if (!inside(at, height)) break;
    if (!near(query, 1))
      context.fillText(query.toLocaleString("en"), MARGIN.left - 8, MARGIN.top + Math.min(height - 5, Math.max(5, at)));
  }
  const at = (token + 0.5 - view.y) * view.scale;
  if (!inside(at, height)) return;
  context.fillStyle = colors["--reads"];
  context.font = "bold 11px system-ui, sans-serif";
  context.fillText(token.toLocaleString("en"), MARGIN.left - 8, MARGIN.top + Math.min(height - 5, Math.max(5, at)));
};

// 1, 2, 5, 10, 20, ... or, from 128 on, a power of two: at least so much
function niceStep(least) {
  if (least > 100) return 2 ** Math.ceil(Math.log2(least));
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= Math.max(1, least));
}

// The colours of the page, by the names of their variables.
function colorsOf(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
}

function rgbOf(name) {
  const hex = colorsOf(name)[name];
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
