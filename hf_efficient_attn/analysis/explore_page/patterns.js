// Who may read whom, as in hf_efficient_attn/patterns: what is drawn here is what Python computes, pair by pair.
//
// keys(first, last, from, to) are intervals of the keys from ... to - 1 that some query of first ... last may read;
// exact for one query, otherwise an upper bound. fullKeys are those that all of these queries may read: exact for one
// query, otherwise a lower bound. Random blocks are drawn beside what they exclude, so the bounds are those of Python.

class PatternError extends Error {}

class Pattern {
  // place: {numKeys, layer, head, numHeads}
  resolve() {
    return this;
  }

  fullKeys(first, last, from, to) {
    return first === last ? this.keys(first, last, from, to) : [];
  }

  causal() {
    return new Intersection([this, new Distances(null, 0, 1)]);
  }

  get dependsOnLength() {
    return this.parts().some((part) => part.dependsOnLength);
  }

  // The smallest number of heads that it accepts.
  get numHeadPatterns() {
    return this.parts().reduce((all, part) => leastCommonMultiple(all, part.numHeadPatterns), 1);
  }

  // Whether layers and heads may differ although they have the same pattern.
  get isRandom() {
    return this.parts().some((part) => part.isRandom);
  }

  parts() {
    return [];
  }
}

function leastCommonMultiple(first, second) {
  let [a, b] = [first, second];
  while (b) [a, b] = [b, a % b];
  return (first / a) * second;
}

// full, causal, band, dilated, strided: query q reads q + step·i, at most `left` before and `right` after it.
class Distances extends Pattern {
  constructor(left, right, step) {
    super();
    Object.assign(this, { left, right, step });
  }

  keys(first, last, from, to) {
    const { left, right, step } = this;
    const lowest = Math.max(left === null ? -Infinity : -Math.floor(left / step), Math.ceil((from - last) / step));
    const highest = Math.min(right === null ? Infinity : Math.floor(right / step), Math.floor((to - 1 - first) / step));
    if (highest < lowest) return [];
    if (last - first + 1 >= step) return clip([first + lowest * step, last + highest * step + 1], from, to);
    const found = [];
    for (let distance = lowest * step; distance <= highest * step; distance += step) {
      const start = Math.max(first + distance, from);
      const stop = Math.min(last + distance + 1, to);
      if (start < stop) found.push(start, stop);
    }
    return found;
  }

  fullKeys(first, last, from, to) {
    if (this.step > 1 || first === last) return super.fullKeys(first, last, from, to);
    const start = this.left === null ? from : last - this.left;
    const stop = this.right === null ? to : first + this.right + 1;
    return clip([start, stop], from, to);
  }

  causal() {
    return new Distances(this.left, this.right === null ? 0 : Math.min(this.right, 0), this.step);
  }
}

class GlobalTokens extends Pattern {
  constructor(positions, readsAll, readByAll) {
    super();
    Object.assign(this, { positions, readsAll, readByAll });
    this.intervals = intervalsOf(positions);
  }

  get dependsOnLength() {
    return this.positions.some((position) => position < 0);
  }

  resolve({ numKeys }) {
    const counted = this.positions.map((position) => (position < 0 ? position + numKeys : position));
    const kept = counted.filter((position) => position >= 0 && position < numKeys);
    return new GlobalTokens(kept, this.readsAll, this.readByAll);
  }

  keys(first, last, from, to) {
    if (this.readsAll && countWithin(this.intervals, first, last)) return [from, to];
    return this.readByAll ? clip(this.intervals, from, to) : [];
  }

  fullKeys(first, last, from, to) {
    if (this.readsAll && countWithin(this.intervals, first, last) === last - first + 1) return [from, to];
    return this.readByAll ? clip(this.intervals, from, to) : [];
  }
}

// blocks, block_local: a query reads all keys of the blocks that its own block reads.
class Blocks extends Pattern {
  constructor(pattern, blockTokens) {
    super();
    Object.assign(this, { pattern, blockTokens });
  }

  parts() {
    return [this.pattern];
  }

  resolve(place) {
    const numKeys = Math.ceil(place.numKeys / this.blockTokens);
    return new Blocks(this.pattern.resolve({ ...place, numKeys }), this.blockTokens);
  }

  keys(...extent) {
    return this.expand("keys", ...extent);
  }

  fullKeys(...extent) {
    return this.expand("fullKeys", ...extent);
  }

  expand(method, first, last, from, to) {
    const size = this.blockTokens;
    const [start, stop] = [Math.floor(from / size), Math.ceil(to / size)];
    const blocks = this.pattern[method](Math.floor(first / size), Math.floor(last / size), start, stop);
    return clip(
      blocks.map((block) => block * size),
      from,
      to,
    );
  }
}

// key_table: the keys of each query, as intervals; `rowOf` gives them for a query.
class KeyTable extends Pattern {
  constructor(numRows, rowOf) {
    super();
    Object.assign(this, { numRows, rowOf });
    this.rows = new Map();
  }

  row(query) {
    if (!this.rows.has(query)) this.rows.set(query, this.rowOf(query));
    return this.rows.get(query);
  }

  keys(first, last, from, to) {
    let found = [];
    for (let query = first; query <= Math.min(last, this.numRows - 1); query++) found = union(found, this.row(query));
    return clip(found, from, to);
  }

  fullKeys(first, last, from, to) {
    if (last >= this.numRows) return [];
    let found = this.row(first);
    for (let query = first + 1; query <= last; query++) found = intersect(found, this.row(query));
    return clip(found, from, to);
  }
}

class PerHead extends Pattern {
  constructor(patterns) {
    super();
    this.patterns = patterns;
  }

  parts() {
    return this.patterns;
  }

  get numHeadPatterns() {
    return leastCommonMultiple(super.numHeadPatterns, this.patterns.length);
  }

  resolve(place) {
    const count = this.patterns.length;
    if (place.numHeads % count) {
      throw new PatternError(`${count} patterns of per_head cannot share ${place.numHeads} heads evenly.`);
    }
    return this.patterns[Math.floor(place.head / (place.numHeads / count))].resolve(place);
  }

  causal() {
    return new PerHead(this.patterns.map((part) => part.causal()));
  }
}

class Union extends Pattern {
  constructor(patterns) {
    super();
    this.patterns = patterns;
  }

  parts() {
    return this.patterns;
  }

  resolve(place) {
    return new this.constructor(this.patterns.map((part) => part.resolve(place)));
  }

  causal() {
    return new this.constructor(this.patterns.map((part) => part.causal()));
  }

  keys(...extent) {
    return this.patterns.map((part) => part.keys(...extent)).reduce(union);
  }

  fullKeys(...extent) {
    return this.patterns.map((part) => part.fullKeys(...extent)).reduce(union);
  }
}

class Intersection extends Union {
  keys(...extent) {
    return this.patterns.map((part) => part.keys(...extent)).reduce(intersect);
  }

  fullKeys(...extent) {
    return this.patterns.map((part) => part.fullKeys(...extent)).reduce(intersect);
  }
}

class Complement extends Pattern {
  constructor(pattern) {
    super();
    this.pattern = pattern;
  }

  parts() {
    return [this.pattern];
  }

  resolve(place) {
    return new Complement(this.pattern.resolve(place));
  }

  keys(first, last, from, to) {
    return complement(this.pattern.fullKeys(first, last, from, to), from, to);
  }

  fullKeys(first, last, from, to) {
    return complement(this.pattern.keys(first, last, from, to), from, to);
  }
}
