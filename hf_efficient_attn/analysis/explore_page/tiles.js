// The matrix as tiles of cells, as maps are made of: level L has cells of 2^L × 2^L pairs, exactly counted. Tiles are
// computed in the background; where one is missing, a coarser one is shown.

const TILE_CELLS = 256;
const MAX_TILES = 400;

class Tiles {
  // color: [red, green, blue]
  constructor(pattern, numTokens, color) {
    Object.assign(this, { pattern, numTokens, color });
    this.images = new Map();
    this.wanted = [];
    this.topLevel = Math.max(0, Math.ceil(Math.log2(numTokens / TILE_CELLS)));
  }

  // Draw a view {x, y, scale}: its left column, its top row, and device pixels per token.
  draw(context, view, width, height) {
    const level = Math.min(this.topLevel, Math.max(0, Math.ceil(-Math.log2(view.scale))));
    const size = TILE_CELLS * 2 ** level;
    const last = (start, pixels) => Math.floor((Math.min(start + pixels / view.scale, this.numTokens) - 1e-9) / size);
    const missing = [];
    for (let row = Math.max(0, Math.floor(view.y / size)); row <= last(view.y, height); row++) {
      for (let column = Math.max(0, Math.floor(view.x / size)); column <= last(view.x, width); column++) {
        if (!this.drawTile(context, view, level, row, column)) missing.push([level, row, column]);
      }
    }
    // first the whole as it is seen from far, which stands in for what is missing
    this.wanted = missing.length && !this.images.has(this.name(this.topLevel, 0, 0)) ? [[this.topLevel, 0, 0]] : [];
    this.wanted.push(...missing);
    if (this.wanted.length) startJob("tiles", this.work());
  }

  name(level, row, column) {
    return `${level}/${row}/${column}`;
  }

  // Draw a tile, or the part of a coarser one that stands in for it; return whether it is the tile itself.
  drawTile(context, view, level, row, column) {
    const size = TILE_CELLS * 2 ** level;
    for (let coarser = level; coarser <= this.topLevel; coarser++) {
      const factor = 2 ** (coarser - level);
      const image = this.image(this.name(coarser, Math.floor(row / factor), Math.floor(column / factor)));
      if (!image) continue;
      const cells = TILE_CELLS / factor;
      const [left, top] = [(column % factor) * cells, (row % factor) * cells];
      const [x, y] = [(column * size - view.x) * view.scale, (row * size - view.y) * view.scale];
      context.imageSmoothingEnabled = view.scale * 2 ** coarser < 2;
      context.drawImage(image, left, top, cells, cells, x, y, size * view.scale, size * view.scale);
      return coarser === level;
    }
    return false;
  }

  // The image of a tile, which becomes the most recently used one.
  image(name) {
    const image = this.images.get(name);
    if (!image) return null;
    this.images.delete(name);
    this.images.set(name, image);
    return image;
  }

  *work() {
    while (this.wanted.length) {
      const [level, row, column] = this.wanted[0];
      const name = this.name(level, row, column);
      if (!this.images.has(name)) {
        if (this.begun?.name !== name) this.begun = { name, steps: this.compute(level, row, column) };
        const { done, value } = this.begun.steps.next();
        if (!done) {
          yield;
          continue;
        }
        this.begun = null;
        this.images.set(name, value);
        if (this.images.size > MAX_TILES) this.images.delete(this.images.keys().next().value);
        requestRedraw();
      }
      this.wanted.shift();
    }
  }

  *compute(level, row, column) {
    const cell = 2 ** level;
    const [firstRow, from] = [row * TILE_CELLS * cell, column * TILE_CELLS * cell];
    const to = Math.min(from + TILE_CELLS * cell, this.numTokens);
    const counts = new Float64Array(TILE_CELLS * TILE_CELLS);
    const stop = Math.min(firstRow + TILE_CELLS * cell, this.numTokens);
    let looked = 0;
    for (let query = firstRow; query < stop; query++) {
      const keys = this.pattern.keys(query, from, to);
      const base = Math.floor((query - firstRow) / cell) * TILE_CELLS;
      for (let i = 0; i < keys.length; i += 2) addInterval(counts, base, keys[i] - from, keys[i + 1] - from, cell);
      looked += keys.length + ROW_INTERVALS;
      if (looked < INTERVALS_PER_STEP) continue;
      looked = 0;
      yield;
    }
    return this.painted(counts, cell * cell);
  }

  painted(counts, full) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = TILE_CELLS;
    const context = canvas.getContext("2d");
    const image = context.createImageData(TILE_CELLS, TILE_CELLS);
    counts.forEach((count, place) => {
      image.data.set(this.color, 4 * place);
      // a single pair stays visible from far
      image.data[4 * place + 3] = count ? 255 * (0.2 + 0.8 * Math.sqrt(count / full)) : 0;
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

// Add the keys start ... stop - 1 to the counts of their cells.
function addInterval(counts, base, start, stop, cell) {
  const first = Math.floor(start / cell);
  const last = Math.floor((stop - 1) / cell);
  if (first === last) {
    counts[base + first] += stop - start;
    return;
  }
  counts[base + first] += (first + 1) * cell - start;
  for (let place = first + 1; place < last; place++) counts[base + place] += cell;
  counts[base + last] += stop - last * cell;
}
