// The binary partition tree of BP-Transformer: nodes level by level, tokens first.

function levelSizes(numTokens) {
  const sizes = [];
  for (let size = numTokens; size > 1; size = Math.ceil(size / 2)) sizes.push(size);
  return [...sizes, 1];
}

function spanTreeNodes(numTokens) {
  return levelSizes(numTokens).reduce((all, size) => all + size, 0);
}

// As `bisect_left`: the first number of tokens from 1 up to `numNodes` whose tree has at least so many nodes.
function tokensOfTree(numNodes) {
  let [low, high] = [1, numNodes];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (spanTreeNodes(middle) < numNodes) low = middle + 1;
    else high = middle;
  }
  return low;
}

class SpanTree extends Pattern {
  constructor(numNodes, isCausal, builder) {
    super();
    Object.assign(this, { numNodes, isCausal, builder });
  }

  get dependsOnLength() {
    return true;
  }

  causal() {
    return new SpanTree(this.numNodes, true, this.builder);
  }

  resolve({ numKeys }) {
    const numTokens = tokensOfTree(numKeys);
    if (spanTreeNodes(numTokens) !== numKeys) {
      const near = [numTokens - 1, numTokens].map((tokens) => `${spanTreeNodes(tokens)} (of ${tokens} tokens)`);
      throw new PatternError(`No span tree has ${numKeys} nodes; give the length ${near.join(" or ")}.`);
    }
    return new SizedSpanTree(numTokens, this.numNodes, this.isCausal, this.builder);
  }
}

class SizedSpanTree extends Pattern {
  constructor(numTokens, numNodes, leftOnly, builder) {
    super();
    Object.assign(this, { numTokens, numNodes, leftOnly, builder });
    let offset = 0;
    this.levels = levelSizes(numTokens).map((size) => {
      offset += size;
      return { offset: offset - size, size };
    });
  }

  causal() {
    return new SizedSpanTree(this.numTokens, this.numNodes, true, this.builder);
  }

  keys(first, last, from, to) {
    let found = this.neighbours(first, Math.min(last, this.numTokens - 1));
    this.levels.forEach(({ offset, size }, level) => {
      const [start, end] = [Math.max(first - offset, 0), Math.min(last - offset, size - 1)];
      const tokens = [start * 2 ** level, Math.min((end + 1) * 2 ** level, this.numTokens)];
      if (start <= end) found = union(found, tokens);
    });
    return clip(found, from, to);
  }

  fullKeys(first, last, from, to) {
    if (first === last || last >= this.numTokens) return super.fullKeys(first, last, from, to);
    const ends = this.contexts(last);
    let found = [];
    this.contexts(first).forEach((context, index) => {
      const start = Math.max(ends[index].start, ends[index].offset);
      const stop = Math.min(context.stop, context.end);
      if (start < stop) found = union(found, [start, stop]);
    });
    return clip(found, from, to);
  }

  // The nodes that a token reads besides itself, level by level, first to the left, then to the right.
  contexts(query) {
    const contexts = [];
    const half = (number) => Math.floor(number / 2);
    let [pointer, stop] = [query - 1, query];
    for (const { offset, size } of this.levels) {
      const border = half(pointer - this.numNodes + 1);
      const ends = { start: offset + 2 * border, stop: offset + stop, offset, end: offset + size };
      contexts.push({ side: -1, pointer: offset + pointer, ...ends });
      [pointer, stop] = [half(pointer - this.numNodes), border];
    }
    let start = query + 1;
    pointer = start;
    for (const { offset, size } of this.leftOnly ? [] : this.levels) {
      const border = half(pointer + this.numNodes + 1);
      const ends = { start: offset + start, stop: offset + 2 * border, offset, end: offset + size };
      contexts.push({ side: 1, pointer: offset + pointer, ...ends });
      [pointer, start] = [half(pointer + this.numNodes), border];
    }
    return contexts;
  }

  // Whether the release reads the node after the level, for some query between those of two contexts.
  misreads(first, last) {
    const isOdd = (first.end - first.offset) % 2 === 1;
    const isPossible = this.builder === "release" && first.side > 0 && isOdd && first.end > 1;
    const lastPointer = first.end - this.numNodes;
    return isPossible && first.pointer <= lastPointer && last.pointer >= lastPointer;
  }

  neighbours(first, last) {
    if (first > last) return [];
    const ends = this.contexts(last);
    let found = [];
    this.contexts(first).forEach((context, index) => {
      const [start, stop] = [Math.max(context.start, context.offset), Math.min(ends[index].stop, context.end)];
      if (start < stop) found = union(found, [start, stop]);
      if (this.misreads(context, ends[index])) found = union(found, [context.end, context.end + 1]);
    });
    return found;
  }
}
