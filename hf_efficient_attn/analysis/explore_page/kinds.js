// The patterns by name: their arguments in order, what each may be, and what it is by default.

const MAX_INTEGER = 2 ** 31 - 1;
const MAX_AXES = 8;

function isInteger(value) {
  return typeof value === "number";
}

function atLeast(least) {
  return {
    test: (value) => isInteger(value) && value >= least && value <= MAX_INTEGER,
    says: `an integer of at least ${least}`,
  };
}

const LIMIT = {
  test: (value) => value === null || (isInteger(value) && value >= -1 && value <= MAX_INTEGER),
  says: "a number of tokens, -1 to leave the query itself out, or None for no limit",
};
const BOOL = { test: (value) => typeof value === "boolean", says: "True or False" };
const TOKENS_OR_NONE = {
  test: (value) => value === null || atLeast(1).test(value),
  says: "a number of tokens, at least 1, or None",
};
const PATTERN = { test: (value) => value instanceof Pattern, says: "a pattern, such as band(4, 4)" };
const PATTERN_OR_NONE = { test: (value) => value === null || PATTERN.test(value), says: "a pattern or None" };
const PATTERNS = {
  test: (value) => Array.isArray(value) && value.length > 0 && value.every(PATTERN.test),
  says: "a list of patterns",
};
const INTEGERS = {
  test: (value) => Array.isArray(value) && value.every((entry) => isInteger(entry) && Math.abs(entry) <= MAX_INTEGER),
  says: "a list of integers, such as [0]",
};
const ROWS = {
  test: (value) =>
    Array.isArray(value) &&
    value.length > 0 &&
    value.every((row) => INTEGERS.test(row) && row.every((key) => key >= 0)),
  says: "a list with the keys of every query, such as [[0], [0, 1]]",
};

function sizes(firstMayBeNone) {
  return {
    test: (value) =>
      Array.isArray(value) &&
      value.length > 0 &&
      value.length <= MAX_AXES &&
      value.every((size, axis) => atLeast(1).test(size) || (size === null && axis === 0 && firstMayBeNone)),
    says: `a list of 1 to ${MAX_AXES} sizes of at least 1, such as [56, 56]`,
  };
}

function oneOf(...choices) {
  return { test: (value) => choices.includes(value), says: `one of ${choices.join(", ")}` };
}

const PLANS = Object.keys(PREFIX_LENGTHS);
const BUILDERS = oneOf("fixed", "release");
const GRID = [
  ["axes", PATTERNS],
  ["prefix_tokens", atLeast(0), 0],
  ["borders", oneOf("cut", "shifted"), "cut"],
  ["is_causal", BOOL, false],
];

// kind: [class in Python, [[argument, what it may be, default], ...], what it makes]
const KINDS = {
  full: ["Full", [], () => new Distances(null, null, 1)],
  causal: ["Causal", [], () => new Distances(null, 0, 1)],
  band: [
    "Band",
    [
      ["left", LIMIT],
      ["right", LIMIT],
    ],
    (left, right) => new Distances(left, right, 1),
  ],
  dilated: [
    "Dilated",
    [
      ["left", LIMIT],
      ["right", LIMIT],
      ["step", atLeast(1)],
    ],
    (left, right, step) => new Distances(left, right, step),
  ],
  strided: ["Strided", [["step", atLeast(1)]], (step) => new Distances(null, null, step)],
  global_tokens: [
    "GlobalTokens",
    [
      ["positions", INTEGERS],
      ["reads_all", BOOL, true],
      ["read_by_all", BOOL, true],
    ],
    (positions, readsAll, readByAll) => {
      if (readsAll || readByAll) return new GlobalTokens(positions, readsAll, readByAll);
      throw new PatternError("global_tokens: reads_all and read_by_all are both False; set at least one.");
    },
  ],
  block_local: ["BlockLocal", [["block_tokens", atLeast(1)]], (size) => new Blocks(new Distances(0, 0, 1), size)],
  blocks: [
    "Blocks",
    [
      ["pattern", PATTERN],
      ["block_tokens", atLeast(1)],
    ],
    (pattern, size) => new Blocks(pattern, size),
  ],
  random_blocks: [
    "RandomBlocks",
    [
      ["num_blocks", atLeast(1)],
      ["block_tokens", atLeast(1)],
      ["seed", atLeast(0), 0],
      ["exclude", PATTERN_OR_NONE, null],
      ["is_causal", BOOL, false],
    ],
    (...fields) => new RandomBlocks(...fields),
  ],
  bigbird_blocks: [
    "BigBirdBlocks",
    [
      ["num_blocks", atLeast(1)],
      ["block_tokens", atLeast(1)],
      ["seed", atLeast(0), 0],
      ["plan", oneOf(...PLANS), PLANS[0]],
    ],
    (...fields) => new BigBirdBlocks(...fields),
  ],
  bigbird: [
    "bigbird",
    [
      ["block_tokens", atLeast(1), 64],
      ["num_random_blocks", atLeast(0), 3],
      ["seed", atLeast(0), 0],
      ["plan", oneOf("seeded", ...PLANS), "seeded"],
      ["causal", BOOL, false],
    ],
    bigbird,
  ],
  span_tree: [
    "SpanTree",
    [
      ["num_nodes", atLeast(1)],
      ["is_causal", BOOL, false],
      ["builder", BUILDERS, "fixed"],
    ],
    (...fields) => new SpanTree(...fields),
  ],
  sized_span_tree: [
    "SizedSpanTree",
    [
      ["num_tokens", atLeast(1)],
      ["num_nodes", atLeast(1)],
      ["left_only", BOOL, false],
      ["builder", BUILDERS, "fixed"],
    ],
    (...fields) => new SizedSpanTree(...fields),
  ],
  interleaved_span_tree: [
    "InterleavedSpanTree",
    [
      ["num_nodes", atLeast(1)],
      ["left_only", BOOL, false],
      ["num_tokens", TOKENS_OR_NONE, null],
    ],
    (...fields) => new InterleavedSpanTree(...fields),
  ],
  grid: ["Grid", [["shape", sizes(true)], ...GRID], (...fields) => gridOf(Grid, ...fields)],
  sized_grid: ["SizedGrid", [["shape", sizes(false)], ...GRID], (...fields) => gridOf(SizedGrid, ...fields)],
  key_table: ["KeyTable", [["rows", ROWS]], (rows) => new KeyTable(rows.length, (query) => intervalsOf(rows[query]))],
  per_head: ["PerHead", [["patterns", PATTERNS]], (patterns) => new PerHead(patterns)],
  union: ["Union", [["patterns", PATTERNS]], (patterns) => new Union(patterns)],
  intersection: ["Intersection", [["patterns", PATTERNS]], (patterns) => new Intersection(patterns)],
  complement: ["Complement", [["pattern", PATTERN]], (pattern) => new Complement(pattern)],
};

function bigbird(blockTokens, numRandomBlocks, seed, plan, causal) {
  const neighbours = new Distances(1, causal ? 0 : 1, 1);
  const both = new Union([neighbours, new GlobalTokens(causal ? [0] : [0, -1], true, true)]);
  if (causal && plan !== "seeded") throw new PatternError(`bigbird: the plan ${plan} has no causal form.`);
  const blocks = new Blocks(both, blockTokens);
  const rest = causal ? blocks.causal() : blocks;
  if (!numRandomBlocks) return rest;
  if (plan !== "seeded") return new Union([rest, new BigBirdBlocks(numRandomBlocks, blockTokens, seed, plan)]);
  return new Union([rest, new RandomBlocks(numRandomBlocks, blockTokens, seed, rest, causal)]);
}

function makePattern(name, values, options) {
  let kind = name.replace(/_$/, "");
  let listed = values;
  if (kind === "global") {
    kind = "global_tokens";
    listed = values.length === 1 && Array.isArray(values[0]) ? values : [values];
  }
  const known = Object.keys(KINDS).find((each) => each === kind || KINDS[each][0] === kind);
  if (["compressed_keys", "CompressedKeys", "gathered_keys", "GatheredKeys"].includes(kind)) {
    throw new PatternError(`${name} has keys of another sequence; this page shows tokens of one sequence.`);
  }
  if (["block_top_k", "BlockTopK"].includes(kind)) {
    throw new PatternError(`${name} chooses keys by their content, so that there is nothing to draw.`);
  }
  if (!known) {
    const names = Object.keys(KINDS).filter((each) => each !== "global_tokens");
    throw new PatternError(`No pattern is called ${name}; there are ${["global", ...names].sort().join(", ")}.`);
  }
  const [, fields, make] = KINDS[known];
  return make(...argumentsOf(name, fields, listed, options));
}

function argumentsOf(name, fields, values, options) {
  const names = fields.map(([field]) => field);
  const written = fields.map(([field, , other]) => field + (other === undefined ? "" : "=…"));
  const form = `write ${name}(${written.join(", ")})`;
  const unknown = Object.keys(options).find((option) => !names.includes(option));
  if (unknown !== undefined || values.length > fields.length) {
    throw new PatternError(`${name} takes ${unknown === undefined ? "fewer arguments" : `no ${unknown}`}; ${form}.`);
  }
  return fields.map(([field, type, other], index) => {
    const isTwice = index < values.length && field in options;
    const value = index < values.length ? values[index] : field in options ? options[field] : other;
    if (isTwice || value === undefined) {
      throw new PatternError(`${name} needs ${field} ${isTwice ? "only once" : "too"}; ${form}.`);
    }
    if (!type.test(value)) throw new PatternError(`${name}: ${field} must be ${type.says}.`);
    return value;
  });
}
