// Grids: tokens in rows, which read along every axis by a pattern of its own.

// The tokens first ... last as boxes: the first and last coordinate on every axis.
function boxesOf(first, last, shape) {
  if (shape.length === 1) return [[[first, last]]];
  const inner = shape.slice(1);
  const rowTokens = inner.reduce((all, size) => all * size, 1);
  let [top, bottom] = [Math.floor(first / rowTokens), Math.floor(last / rowTokens)];
  const [start, stop] = [first % rowTokens, last % rowTokens];
  const part = (row, from, to) => boxesOf(from, to, inner).map((box) => [[row, row], ...box]);
  if (top === bottom) return part(top, start, stop);
  const found = [];
  if (start > 0) found.push(...part(top++, start, rowTokens - 1));
  if (stop < rowTokens - 1) found.push(...part(bottom--, 0, stop));
  if (top <= bottom) found.push([[top, bottom], ...inner.map((size) => [0, size - 1])]);
  return found;
}

// The tokens whose coordinates lie in the intervals of every axis.
function crossed(ofAxes, shape) {
  let tokens = [0, 1];
  let numInner = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    const found = [];
    for (let i = 0; i < ofAxes[axis].length; i += 2) {
      for (let coordinate = ofAxes[axis][i]; coordinate < ofAxes[axis][i + 1]; coordinate++) {
        for (let j = 0; j < tokens.length; j += 2) {
          append(found, coordinate * numInner + tokens[j], coordinate * numInner + tokens[j + 1]);
        }
      }
    }
    tokens = found;
    numInner *= shape[axis];
  }
  return tokens;
}

// An axis whose ends move what is read inwards: as many keys for every query, as far as its class has them.
class ShiftedBand extends Pattern {
  constructor(left, right, step, size) {
    super();
    Object.assign(this, { left, right, step, size });
  }

  keys(first, last, from, to) {
    const found = [];
    for (let query = first; query <= last; query++) {
      const residue = query % this.step;
      const lastPlace = Math.floor((this.size - 1 - residue) / this.step);
      const width = this.left + this.right;
      const start = Math.max(0, Math.min(Math.floor(query / this.step) - this.left, lastPlace - width));
      for (let place = start; place <= Math.min(lastPlace, start + width); place++) {
        found.push(residue + this.step * place);
      }
    }
    return clip(intervalsOf(found), from, to);
  }
}

class SizedGrid extends Pattern {
  constructor(shape, axes, prefixTokens, borders, isCausal) {
    super();
    Object.assign(this, { shape, axes, prefixTokens, borders, isCausal });
    this.numTokens = prefixTokens + shape.reduce((all, size) => all * size, 1);
    this.moved = axes.map((axis, number) => {
      if (borders === "cut" || !(axis instanceof Distances) || axis.left === null) return axis;
      const { left, right, step } = axis;
      return new ShiftedBand(Math.floor(left / step), Math.floor(right / step), step, shape[number]);
    });
  }

  parts() {
    return this.axes;
  }

  resolve(place) {
    const axes = this.axes.map((axis, number) => axis.resolve({ ...place, numKeys: this.shape[number] }));
    return new SizedGrid(this.shape, axes, this.prefixTokens, this.borders, this.isCausal);
  }

  causal() {
    return new SizedGrid(this.shape, this.axes, this.prefixTokens, this.borders, true);
  }

  keys(first, last, from, to) {
    if (first < this.prefixTokens && !this.isCausal) return [from, to];
    const read = this.read("keys", first, last).reduce(union, [0, this.prefixTokens]);
    return clip(read, from, this.isCausal ? Math.min(to, last + 1) : to);
  }

  fullKeys(first, last, from, to) {
    if (first === last) return this.keys(first, last, from, to);
    if (last < this.prefixTokens && !this.isCausal) return [from, to];
    const isInside = last < this.numTokens && (first >= this.prefixTokens || !this.isCausal);
    const read = isInside ? this.read("fullKeys", first, last).reduce(intersect) : [];
    return clip(union([0, this.prefixTokens], read), from, this.isCausal ? Math.min(to, first + 1) : to);
  }

  // The keys of each box of queries.
  read(method, first, last) {
    const { prefixTokens, shape } = this;
    const [start, end] = [Math.max(first, prefixTokens), Math.min(last, this.numTokens - 1)];
    if (start > end) return [];
    return boxesOf(start - prefixTokens, end - prefixTokens, shape).map((box) => {
      const ofAxes = this.moved.map((axis, number) => axis[method](...box[number], 0, shape[number]));
      return crossed(ofAxes, shape).map((token) => token + prefixTokens);
    });
  }
}

// A grid that has to fit the text.
class Grid extends Pattern {
  constructor(shape, axes, prefixTokens, borders, isCausal) {
    super();
    Object.assign(this, { shape, axes, prefixTokens, borders, isCausal });
  }

  parts() {
    return this.axes;
  }

  get dependsOnLength() {
    if (!this.isCausal || super.dependsOnLength) return true;
    return this.shape[0] === null && this.borders === "shifted";
  }

  causal() {
    return new Grid(this.shape, this.axes, this.prefixTokens, this.borders, true);
  }

  resolve(place) {
    const inner = this.shape.slice(1);
    const rowTokens = inner.reduce((all, size) => all * size, 1);
    const numOwn = place.numKeys - this.prefixTokens;
    const numRows = this.shape[0] ?? Math.max(1, Math.ceil(numOwn / rowTokens));
    const numGrid = numRows * rowTokens;
    if (numOwn !== numGrid && !(this.isCausal && numOwn < numGrid)) {
      throw new PatternError(
        `grid: the text has ${place.numKeys} tokens, but ${this.prefixTokens} prefix tokens and ${numRows} rows of ` +
          `${rowTokens} are ${this.prefixTokens + numGrid}. Choose this length, or give another shape.`,
      );
    }
    const shape = [numRows, ...inner];
    return new SizedGrid(shape, this.axes, this.prefixTokens, this.borders, this.isCausal).resolve(place);
  }
}

function canShift(axis) {
  if (axis instanceof PerHead) return axis.patterns.every(canShift);
  if (!(axis instanceof Distances)) return false;
  if (axis.left === null && axis.right === null) return axis.step === 1;
  return axis.left !== null && axis.right !== null && axis.left >= 0 && axis.right >= 0;
}

function gridOf(kind, shape, axes, prefixTokens, borders, isCausal) {
  if (axes.length !== shape.length) {
    throw new PatternError(`grid: there are ${shape.length} sizes and ${axes.length} axes; give a pattern for each.`);
  }
  if (prefixTokens + shape.reduce((all, size) => all * (size ?? 1), 1) > MAX_INTEGER) {
    throw new PatternError("grid: no text has so many tokens.");
  }
  if (borders === "shifted" && !axes.every(canShift)) {
    throw new PatternError("grid: borders shift for full(), and for band and dilated with two limits of at least 0.");
  }
  return new kind(shape, axes, prefixTokens, borders, isCausal);
}
