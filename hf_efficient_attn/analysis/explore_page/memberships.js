// Which clusters or buckets hold the tokens of a text, as the layers of the model have chosen them.

class Memberships {
  // tokens: those of which they are known; layers: of each layer its numbers, or null
  constructor({ tokens, layers }) {
    this.tokens = tokens;
    this.places = new Map(tokens.map((token, place) => [token, place]));
    this.layers = layers.map((layer) => {
      if (!layer) return null;
      const queries = { ...layer.queries, numbers: unpacked(layer.queries.numbers, Int32Array) };
      const keys = layer.keys ? { ...layer.keys, numbers: unpacked(layer.keys.numbers, Int32Array) } : queries;
      return { ...layer, queries, keys };
    });
    this.kind = this.layers.find(Boolean).kind;
  }

  // The layer's numbers, if the head is one of those that have any.
  of(layer, head) {
    const found = this.layers[layer];
    return found && head < found.heads ? found : null;
  }

  // The first head that has any.
  get first() {
    return { layer: this.layers.findIndex(Boolean), head: 0 };
  }

  // The numbers of the groups that hold a token, as one of the "queries" or "keys".
  numbers(side, layer, head, token) {
    const { most, numbers } = this.of(layer, head)[side];
    const place = this.places.get(token);
    if (place === undefined) return [];
    const start = (head * this.tokens.length + place) * most;
    return [...numbers.subarray(start, start + most)].filter((number) => number >= 0);
  }

  // The tokens, as keys, that share a group with a token, and how many of them each of its groups holds.
  mates(layer, head, token) {
    const sizes = new Map(this.numbers("queries", layer, head, token).map((number) => [number, 0]));
    const tokens = this.tokens.filter((key) => {
      const shared = this.numbers("keys", layer, head, key).filter((number) => sizes.has(number));
      for (const number of shared) sizes.set(number, sizes.get(number) + 1);
      return shared.length;
    });
    return { tokens, sizes };
  }

  // Layers, heads, rounds, clusters and buckets are counted from 0.
  groupName(layer, number) {
    const { kind, count: each, queries } = this.layers[layer];
    const isHashedOften = kind === "bucket" && queries.most > 1;
    return `${kind} ${number % each}${isHashedOften ? `, round ${Math.floor(number / each)}` : ""}`;
  }

  // The groups of a token as a text; it is empty where none are known.
  tokenText(layer, head, token) {
    const found = this.of(layer, head);
    if (!found || !this.places.has(token)) return "";
    const said = (side) => {
      const names = this.numbers(side, layer, head, token).map((number) => this.groupName(layer, number));
      return names.join("; ") || `no ${found.kind}`;
    };
    const [query, key] = [said("queries"), said("keys")];
    return query === key ? query : `${query} as a query; ${key} as a key`;
  }

  // What a head chooses among.
  headText(layer, head) {
    const found = this.of(layer, head);
    if (!found) return "";
    const rounds = found.kind === "bucket" && found.queries.most > 1 ? ` in ${found.queries.most} rounds` : "";
    return `${count(found.count)} ${found.kind}s${rounds}`;
  }
}

const MEMBERSHIP_HINTS = {
  cluster: "Heads that route attend only to tokens of the same cluster.",
  bucket: "Tokens are sorted by bucket, and attend to the chunks near their own place in this order.",
};

// Say in which groups the chosen token is, and return the tokens that share one with it, of which `found` are read.
function showMembership(found) {
  const { layer, head, place } = chosen;
  const row = model.rows[place];
  const of = model.memberships?.of(layer, head);
  element("membership").hidden = !of;
  if (!of) return new Set();
  const { tokens, sizes } = model.memberships.mates(layer, head, row);
  const mates = new Set(tokens);
  element("membership-title").textContent = sizes.size ? "It is in" : `It is in no ${of.kind}`;
  const facts = [...sizes].map(([number, size]) => [
    model.memberships.groupName(layer, number),
    `${count(size)} tokens`,
  ]);
  fillList(element("membership-facts"), facts);
  const shared = found.filter(({ key }) => mates.has(key)).length;
  const numKnown = model.memberships.tokens.length;
  const known = numKnown < model.tokens.length ? ` This page holds the ${of.kind}s of ${count(numKnown)} tokens.` : "";
  element("membership-hint").textContent =
    `${MEMBERSHIP_HINTS[of.kind]} ${shared} of the ${found.length} tokens below share one with it.${known}`;
  return mates;
}
