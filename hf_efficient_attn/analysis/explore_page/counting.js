// What is counted over all queries, as generators that yield often.

// intervals looked at in a step, which takes less than a millisecond; a row counts as ROW_INTERVALS more
const INTERVALS_PER_STEP = 4000;
const ROW_INTERVALS = 20;

// How many keys the queries read: calls `done({pairs, fewest, most, isCausal})`.
function* countPairs(pattern, numTokens, done) {
  let [pairs, fewest, most, isCausal, looked] = [0, Infinity, 0, true, 0];
  for (let query = 0; query < numTokens; query++) {
    const keys = pattern.keys(query, 0, numTokens);
    const count = sizeOf(keys);
    pairs += count;
    fewest = Math.min(fewest, count);
    most = Math.max(most, count);
    isCausal = isCausal && !(keys[keys.length - 1] > query + 1);
    looked += keys.length + ROW_INTERVALS;
    if (looked < INTERVALS_PER_STEP) continue;
    looked = 0;
    yield;
  }
  done({ pairs, fewest, most, isCausal });
}

// Which queries read a key: calls `done(intervals)`.
function* findReaders(pattern, key, numTokens, done) {
  const readers = [];
  for (let query = 0; query < numTokens; query++) {
    if (pattern.keys(query, key, key + 1).length) append(readers, query, query + 1);
    if (query % 128 === 127) yield;
  }
  done(readers);
}

// From how many tokens information can come to a token through the layers, the last layer first: calls
// `done(layers, reached)` after each. patternsOf(layer) are the patterns of its heads, as far as they differ.
function* findReach(patternsOf, numLayers, token, numTokens, done) {
  let reached = new Uint8Array(numTokens);
  reached[token] = 1;
  let size = 1;
  for (let layer = numLayers - 1; layer >= 0; layer--) {
    const patterns = patternsOf(layer);
    // skips keep what a token knows
    const next = reached.slice();
    const changes = new Int32Array(numTokens + 1);
    let looked = 0;
    for (let query = 0; query < numTokens; query++) {
      if (!reached[query]) continue;
      const keys = patterns.map((pattern) => pattern.keys(query, 0, numTokens)).reduce(union);
      for (let i = 0; i < keys.length; i += 2) {
        changes[keys[i]]++;
        changes[keys[i + 1]]--;
      }
      looked += keys.length + ROW_INTERVALS;
      if (looked < INTERVALS_PER_STEP) continue;
      looked = 0;
      yield;
    }
    size = 0;
    for (let key = 0, open = 0; key < numTokens; key++) {
      open += changes[key];
      if (open > 0) next[key] = 1;
      size += next[key];
    }
    reached = next;
    done(numLayers - layer, size);
    if (size === numTokens) return;
    yield;
  }
}
