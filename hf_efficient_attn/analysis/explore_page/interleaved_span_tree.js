// BP-Transformer's tree with two nodes for each token: token t is node 2t, and the span whose left half ends with it is
// node 2t + 1. Where the text ends within the left half of a span, a smaller one with the same tokens stands in for it.

// Of more queries than these all keys are an upper bound that is good enough.
const MOST_NODES_AT_ONCE = 64;

class InterleavedSpanTree extends Pattern {
  constructor(numNodes, leftOnly, numTokens) {
    super();
    Object.assign(this, { numNodes, leftOnly, numTokens });
  }

  get dependsOnLength() {
    return !this.leftOnly && this.numTokens === null;
  }

  causal() {
    return new InterleavedSpanTree(this.numNodes, true, this.numTokens);
  }

  resolve({ numKeys }) {
    if (!this.dependsOnLength) return this;
    if (numKeys % 2) {
      const near = `${numKeys - 1} or ${numKeys + 1}`;
      throw new PatternError(
        `An interleaved span tree has two nodes for each token, and cannot have ${numKeys}; give ${near}.`,
      );
    }
    return new InterleavedSpanTree(this.numNodes, this.leftOnly, numKeys / 2);
  }

  keys(first, last, from, to) {
    if (last - first >= MOST_NODES_AT_ONCE) return [from, to];
    const limit = this.numTokens === null ? to : Math.min(to, 2 * this.numTokens);
    const found = new Set();
    for (let query = first; query <= last; query++) {
      for (const key of this.nodesOf(query, limit)) {
        if (key >= from && key < limit) found.add(key);
      }
    }
    return intervalsOf(found);
  }

  // The nodes that a node reads, in any order; some may lie at or behind `limit`.
  *nodesOf(query, limit) {
    const size = (query + 1) & -(query + 1);
    const start = (query + 1 - size) / 2;
    for (let token = start; token < start + size && 2 * token < limit; token++) yield 2 * token;
    if (query % 2 === 0) yield* this.neighbours(query / 2, limit);
  }

  *neighbours(token, limit) {
    const k = this.numNodes;
    const down = (number, size) => Math.floor(number / size);
    for (let size = 1; size <= token; size *= 2) {
      const start = Math.max(0, 2 * down(token - 1 + k - 2 * k * size + size, 2 * size));
      const stop = size === 1 ? token : down(token - 1 + k - k * size + size / 2, size);
      for (let index = start; index < stop; index++) yield (2 * index + 1) * size - 1;
    }
    const numTokens = this.numTokens;
    for (let size = 1; !this.leftOnly && size < numTokens; size *= 2) {
      const start = size === 1 ? token + 1 : down(token + 1 - k + k * size + size / 2, size);
      const stop = 2 * down(token + 1 - k + 2 * k * size + size, 2 * size);
      for (let index = start; index < stop && index * size < numTokens; index++) {
        let edge = size;
        // the text ends within its left half
        while (edge > 1 && index * size + edge / 2 > numTokens) edge /= 2;
        const node = 2 * index * size + edge - 1;
        if (node < limit) yield node;
      }
    }
  }
}
