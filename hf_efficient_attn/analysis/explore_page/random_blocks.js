// Random blocks: drawn our way (random_blocks), or as in the published code of BigBird (bigbird_blocks).

// The limits of Python: blocks that are drawn or shuffled, with what a row counts beside them, and excluded intervals.
const MAX_DRAWN_BLOCKS = 1 << 19;
const MAX_SHUFFLED_BLOCKS = 1 << 20;
const MAX_EXCLUDED_INTERVALS = 1 << 16;

class RandomBlocks extends Pattern {
  constructor(numBlocks, blockTokens, seed, exclude, isCausal) {
    super();
    Object.assign(this, { numBlocks, blockTokens, seed, exclude, isCausal });
    if (isCausal && exclude && exclude.dependsOnLength) {
      throw new PatternError(
        "These random blocks have no causal form: they exclude a pattern that depends on the length. Write " +
          "bigbird(..., causal=True), or exclude no such pattern.",
      );
    }
  }

  parts() {
    return this.exclude ? [this.exclude] : [];
  }

  get dependsOnLength() {
    return !this.isCausal;
  }

  get isRandom() {
    return true;
  }

  causal() {
    return new RandomBlocks(this.numBlocks, this.blockTokens, this.seed, this.exclude, true);
  }

  resolve(place) {
    const { blockTokens, numBlocks } = this;
    const numRows = Math.ceil(place.numKeys / blockTokens);
    if (numRows * (16 + Math.min(numRows, numBlocks)) > MAX_DRAWN_BLOCKS) {
      throw new PatternError(
        `random_blocks: ${numRows} rows of blocks of ${blockTokens} tokens are too many to draw. Take longer blocks.`,
      );
    }
    const numTokens = numRows * blockTokens;
    const exclude = this.exclude && this.exclude.resolve({ ...place, numKeys: numTokens });
    let numExcluded = 0;
    const draw = (row) => {
      const touched = exclude ? exclude.keys(row * blockTokens, (row + 1) * blockTokens - 1, 0, numTokens) : [];
      numExcluded += touched.length / 2;
      if (numExcluded > MAX_EXCLUDED_INTERVALS) {
        throw new PatternError("random_blocks: exclude reads single keys in too many places. Exclude whole blocks.");
      }
      return this.drawRow(row, numRows, touched, place);
    };
    return new Blocks(new KeyTable(numRows, draw), blockTokens);
  }

  drawRow(row, numRows, touched, { layer, head }) {
    const size = this.blockTokens;
    let blocks = [];
    for (let i = 0; i < touched.length; i += 2) {
      blocks = union(blocks, [Math.floor(touched[i] / size), Math.ceil(touched[i + 1] / size)]);
    }
    const numCandidates = this.isCausal ? row : numRows;
    const candidates = complement(clip(blocks, 0, numCandidates), 0, numCandidates);
    const length = this.isCausal ? "any" : numRows;
    const text = `seed ${this.seed} layer ${layer} head ${head} row ${row} of ${length}`;
    return sample(text, candidates, this.numBlocks);
  }
}

// The first steps of a Fisher-Yates shuffle of the candidates.
function sample(text, candidates, count) {
  let numLeft = sizeOf(candidates);
  if (numLeft <= count) return candidates;
  const generator = MersenneTwister.ofText(text);
  const [moved, drawn] = [new Map(), []];
  const at = (place) => (moved.has(place) ? moved.get(place) : place);
  for (let i = 0; i < count; i++) {
    const place = Math.floor(generator.random() * numLeft--);
    drawn.push(nth(candidates, at(place)));
    moved.set(place, at(numLeft));
  }
  return intervalsOf(drawn);
}

function nth(intervals, index) {
  let left = index;
  let i = 0;
  for (; left >= intervals[i + 1] - intervals[i]; i += 2) left -= intervals[i + 1] - intervals[i];
  return intervals[i] + left;
}

// Lengths in tokens at which the published code draws from the first 1,024 tokens, on the grid of 4,096.
const PREFIX_LENGTHS = { authors: [1024, 2048, 3072, 4096], transformers: [1024, 3072, 4096] };

class BigBirdBlocks extends Pattern {
  constructor(numBlocks, blockTokens, seed, plan) {
    super();
    Object.assign(this, { numBlocks, blockTokens, seed, plan });
  }

  get dependsOnLength() {
    return true;
  }

  get isRandom() {
    return true;
  }

  resolve({ numKeys, layer, head, numHeads }) {
    const numRows = Math.ceil(numKeys / this.blockTokens);
    if (numHeads * this.numShuffled(numRows) > MAX_SHUFFLED_BLOCKS) {
      throw new PatternError(
        `bigbird_blocks: the published code would shuffle too many blocks of ${this.blockTokens} tokens. Take longer ` +
          "blocks, or plan='seeded'.",
      );
    }
    const stream = new MersenneTwister((this.seed + layer) >>> 0);
    const heads = this.isPrefix(numRows)
      ? Array.from({ length: numHeads }, () => this.prefixRows(stream))
      : this.segmentRows(stream, numRows, numHeads);
    // the first and the last row are global
    const rows = [[], ...heads[head].slice(1, numRows - 1).map(intervalsOf), []];
    return new Blocks(new KeyTable(rows.length, (row) => rows[row]), this.blockTokens);
  }

  isPrefix(numRows) {
    return PREFIX_LENGTHS[this.plan].includes(numRows * this.blockTokens);
  }

  numShuffled(numRows) {
    if (this.isPrefix(numRows)) {
      return Math.floor(4096 / this.blockTokens) * (Math.floor(1024 / this.blockTokens) + 8);
    }
    const [border, count] = this.firstSegment(numRows);
    const inRow = border * (count > 0) + (numRows - border) * (this.numBlocks > count);
    return numRows * (inRow + 8);
  }

  prefixRows(stream) {
    const candidates = range(1, Math.floor(1024 / this.blockTokens));
    const rows = [[]];
    for (let row = 1; row < Math.floor(4096 / this.blockTokens) - 1; row++) {
      const others = candidates.filter((block) => Math.abs(block - row) > 1);
      rows.push(stream.permutation(others).slice(0, this.numBlocks));
    }
    return rows;
  }

  segmentRows(stream, numRows, numHeads) {
    const heads = Array.from({ length: numHeads }, () => Array.from({ length: numRows }, () => []));
    const draw = (rows, start, stop, count) => {
      for (const row of count > 0 ? rows : []) {
        for (const head of heads) {
          head[row].push(...remaining(stream.permutation(range(start, stop)), row, stop).slice(0, count));
        }
      }
    };
    const [border, count] = this.firstSegment(numRows);
    const [early, late] = [range(1, border), range(border, numRows)];
    draw(early, 0, border, count);
    draw(early, border, numRows, this.numBlocks - count);
    draw(late, 0, border, count);
    draw(late, border, numRows, this.numBlocks - count);
    return heads;
  }

  // The length of the first segment in blocks, and how many random blocks come from it.
  firstSegment(numRows) {
    const count = this.numBlocks;
    if (2 * count + 5 < numRows) return [2 * count + 5, count];
    if (count + 5 < numRows) return [count + 5, Math.floor(count / 2)];
    return [numRows, count];
  }
}

function range(start, stop) {
  return Array.from({ length: Math.max(0, stop - start) }, (_, i) => start + i);
}

// The blocks without those that the published code takes for neighbours or global in a segment that ends at `stop`.
function remaining(blocks, row, stop) {
  const leftOut = new Set([row - 1, row, row + 1, 0, stop - 1]);
  if (row === 1) leftOut.add(stop - 2);
  if (row === stop - 2) leftOut.add(1);
  return blocks.filter((block) => !leftOut.has(block));
}
