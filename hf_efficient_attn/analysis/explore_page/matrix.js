// The canvas of the matrix: tiles, axes, the chosen token, and moving about with mouse, touch and keys.

const MARGIN = { left: 58, top: 26 };
const MAX_SCALE = 48;
const GRID_SCALE = 10;

class Matrix {
  // changed(token): a token was chosen; pointed(query, key): the mouse is over a pair, or null over none
  constructor(canvas, changed, pointed) {
    Object.assign(this, { canvas, changed, pointed });
    this.view = { x: 0, y: 0, scale: 1 };
    this.numTokens = 1;
    this.token = 0;
    this.isFitted = true;
    this.pointers = new Map();
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.pointed(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(pattern, numTokens) {
    Object.assign(this, { pattern, numTokens });
    this.tiles = new Tiles(pattern, numTokens, rgbOf("--cell"));
    if (this.isFitted) this.fit();
    this.choose(this.token);
  }

  // Which queries read the chosen token, once it is known.
  setReadBy(intervals) {
    this.readBy = intervals;
    requestRedraw();
  }

  get room() {
    return { width: this.canvas.clientWidth - MARGIN.left, height: this.canvas.clientHeight - MARGIN.top };
  }

  get smallestScale() {
    return Math.min(this.room.width, this.room.height) / this.numTokens;
  }

  resize() {
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(this.canvas.clientHeight * ratio);
    if (this.isFitted) this.fit();
    requestRedraw();
  }

  fit() {
    this.isFitted = true;
    this.view = { x: 0, y: 0, scale: Math.min(MAX_SCALE, this.smallestScale) };
    requestRedraw();
  }

  // Show single tokens around the chosen one.
  single() {
    this.setView(this.token, this.token, 16);
  }

  setView(centreX, centreY, scale) {
    this.isFitted = false;
    const { width, height } = this.room;
    this.view = { x: centreX + 0.5 - width / 2 / scale, y: centreY + 0.5 - height / 2 / scale, scale };
    this.keepInside();
  }

  keepInside() {
    const { view, room, numTokens } = this;
    const inside = (start, pixels) => Math.max(0, Math.min(start, numTokens - pixels / view.scale));
    view.x = inside(view.x, room.width);
    view.y = inside(view.y, room.height);
    requestRedraw();
  }

  zoom(factor, x = this.room.width / 2, y = this.room.height / 2) {
    const { view } = this;
    const lowest = Math.min(this.smallestScale, MAX_SCALE);
    const scale = Math.max(lowest, Math.min(MAX_SCALE, view.scale * factor));
    view.x += x / view.scale - x / scale;
    view.y += y / view.scale - y / scale;
    view.scale = scale;
    this.isFitted = scale === lowest;
    this.keepInside();
  }

  pan(x, y) {
    this.view.x -= x / this.view.scale;
    this.view.y -= y / this.view.scale;
    this.isFitted = false;
    this.keepInside();
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left - MARGIN.left, y: event.clientY - box.top - MARGIN.top };
  }

  // The pair under a place of the canvas, or null.
  pairAt({ x, y }) {
    const { view, numTokens } = this;
    const [key, query] = [Math.floor(view.x + x / view.scale), Math.floor(view.y + y / view.scale)];
    // on the axis of the rows, the row itself
    const isInside = query >= 0 && query < numTokens && key < numTokens && y >= 0;
    return isInside ? { query, key: x < 0 ? null : key } : null;
  }

  wheel(event) {
    event.preventDefault();
    const { x, y } = this.place(event);
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
    if (event.shiftKey) this.pan(-pixels, 0);
    else this.zoom(Math.exp(-Math.max(-120, Math.min(120, pixels)) / 300), x, y);
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { ...this.place(event), moved: 0 });
  }

  move(event) {
    const [now, before] = [this.place(event), this.pointers.get(event.pointerId)];
    this.pointed(this.pairAt(now));
    if (!before) return;
    const [x, y] = [now.x - before.x, now.y - before.y];
    this.pointers.set(event.pointerId, { ...now, moved: before.moved + Math.abs(x) + Math.abs(y) });
    const others = [...this.pointers.entries()].filter(([id]) => id !== event.pointerId);
    if (others.length === 0) {
      if (before.moved + Math.abs(x) + Math.abs(y) > 4) this.pan(x, y);
      return;
    }
    const other = others[0][1];
    const distance = (point) => Math.hypot(point.x - other.x, point.y - other.y);
    this.zoom(distance(now) / Math.max(1, distance(before)), other.x, other.y);
  }

  release(event) {
    const before = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    const pair = before && before.moved <= 4 && this.pairAt(this.place(event));
    if (pair) this.choose(pair.query);
  }

  choose(token) {
    this.token = Math.max(0, Math.min(this.numTokens - 1, token));
    this.readBy = null;
    this.keys = this.pattern.keys(this.token, 0, this.numTokens);
    this.changed(this.token);
    requestRedraw();
  }

  // Choose a token and bring its row into view.
  goTo(token) {
    this.choose(token);
    const { view, room } = this;
    const shown = room.height / view.scale;
    if (this.token < view.y || this.token + 1 > view.y + shown) {
      view.y = this.token - shown / 2;
      // stay beside the diagonal if the view was beside it
      view.x = this.token - room.width / view.scale / 2;
      this.keepInside();
    }
  }

  key(event) {
    const step = event.ctrlKey ? 100 : 1;
    const moves = {
      ArrowUp: () => this.goTo(this.token - step),
      ArrowDown: () => this.goTo(this.token + step),
      ArrowLeft: () => this.pan(80, 0),
      ArrowRight: () => this.pan(-80, 0),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.numTokens - 1),
      "+": () => this.zoom(1.4),
      "=": () => this.zoom(1.4),
      "-": () => this.zoom(1 / 1.4),
      0: () => this.fit(),
      1: () => this.single(),
    };
    if (event.shiftKey) Object.assign(moves, { ArrowUp: () => this.pan(0, 80), ArrowDown: () => this.pan(0, -80) });
    if (!moves[event.key] || event.metaKey) return;
    event.preventDefault();
    moves[event.key]();
  }
}
