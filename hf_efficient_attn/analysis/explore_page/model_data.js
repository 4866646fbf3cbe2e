// What a model reads in a text, as Python has measured it: arrays over layers, heads, measured tokens, kept weights.

// a piece of the text ends with the first line after so many tokens, or else after the most
const PIECE_TOKENS = 256;
const MOST_TOKENS = 2048;
const WORDS = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣" };

function unpacked(text, type) {
  const letters = atob(text);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return new type(bytes.buffer);
}

class ReadText {
  constructor(model) {
    Object.assign(this, model);
    this.keys = unpacked(model.keys, Uint32Array);
    this.num_read = unpacked(model.num_read, Uint32Array);
    for (const name of ["weights", "share", "distance", "effective", "first"]) {
      this[name] = unpacked(model[name], Float32Array);
    }
    this.isSpecial = new Set(model.special);
    this.isGlobal = new Set(model.global_tokens);
    this.memberships = model.memberships && new Memberships(model.memberships);
    this.places = new Map(model.rows.map((row, place) => [row, place]));
  }

  // Where the numbers of a measured token are in the arrays.
  at(layer, head, place) {
    return (layer * this.heads + head) * this.rows.length + place;
  }

  // The strongest weights of a measured token, [{key, weight}].
  strongest(layer, head, place) {
    const start = this.at(layer, head, place) * this.kept;
    const found = [];
    for (let i = start; i < start + this.kept && this.weights[i] > 0; i++) {
      found.push({ key: this.keys[i], weight: this.weights[i] });
    }
    return found;
  }

  // The mean of a measure over the measured tokens of a head; of a span, the span.
  ofHead(measure, layer, head) {
    if (measure === "span") return this.spans[layer][head];
    const start = this.at(layer, head, 0);
    const numbers = this[measure].subarray(start, start + this.rows.length);
    return numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
  }

  // A token in a list: on one line, with what leaves no ink made visible.
  word(token) {
    const text = this.tokens[token].replace(/[\n\t\r]|^ | $/g, (letter) => WORDS[letter]);
    return text || "∅";
  }
}
