// Patterns as expressions, in the syntax of `hf-efficient-attn draw`: band(4, 4) | global(0).

const SIGNS = /\s*(?:(-?\d[\d_]*)|([A-Za-z_]\w*)|("[^"]*"|'[^']*')|([()[\]|&~,=])|(\S))/y;
const CONSTANTS = { True: true, False: false, None: null };
const MAX_DEPTH = 100;

function parsePattern(text) {
  const value = new ExpressionReader(text).whole();
  if (value instanceof Pattern) return value;
  throw new PatternError("This is no pattern; write e.g. band(4, 4) | global(0).");
}

class ExpressionReader {
  constructor(text) {
    this.signs = [];
    this.at = 0;
    this.depth = 0;
    SIGNS.lastIndex = 0;
    const end = text.trimEnd().length;
    while (SIGNS.lastIndex < end) {
      const [, number, name, string, mark, other] = SIGNS.exec(text);
      if (other !== undefined)
        throw new PatternError(`${other} has no place in a pattern; write e.g. band(4, 4) | global(0).`);
      if (number !== undefined) this.signs.push({ number: Number(number.replaceAll("_", "")) });
      else if (name !== undefined) this.signs.push({ name });
      else if (string !== undefined) this.signs.push({ string: string.slice(1, -1) });
      else this.signs.push({ mark });
    }
  }

  whole() {
    const value = this.union();
    if (this.at < this.signs.length)
      throw new PatternError("The expression goes on after its end; join patterns with | or &.");
    return value;
  }

  sees(mark) {
    return this.at < this.signs.length && this.signs[this.at].mark === mark;
  }

  takes(mark) {
    if (!this.sees(mark)) return false;
    this.at++;
    return true;
  }

  needs(mark) {
    if (!this.takes(mark)) throw new PatternError(`A ${mark} is missing; write e.g. band(4, 4) | global(0).`);
  }

  union() {
    return this.joined("|", () => this.joined("&", () => this.negated(), Intersection), Union);
  }

  joined(mark, part, join) {
    if (++this.depth > MAX_DEPTH) throw new PatternError("The expression nests too deep.");
    let value = part();
    while (this.takes(mark)) value = new join([patternOf(value), patternOf(part())]);
    this.depth--;
    return value;
  }

  negated() {
    if (!this.takes("~")) return this.value();
    if (++this.depth > MAX_DEPTH) throw new PatternError("The expression nests too deep.");
    const inner = new Complement(patternOf(this.negated()));
    this.depth--;
    return inner;
  }

  value() {
    const sign = this.signs[this.at++];
    if (sign === undefined) throw new PatternError("The expression ends too early; write e.g. band(4, 4) | global(0).");
    if ("number" in sign) return sign.number;
    if ("string" in sign) return sign.string;
    if ("name" in sign) return this.takes("(") ? this.call(sign.name) : this.constant(sign.name);
    if (sign.mark === "[") return this.list("]");
    if (sign.mark === "(") return this.bracket();
    throw new PatternError(`${sign.mark} has no place here; write e.g. band(4, 4) | global(0).`);
  }

  constant(name) {
    if (name in CONSTANTS) return CONSTANTS[name];
    throw new PatternError(`${name} has no place here; a pattern has brackets, such as causal().`);
  }

  list(end) {
    const entries = [];
    while (!this.takes(end)) {
      entries.push(this.union());
      if (!this.sees(end)) this.needs(",");
    }
    return entries;
  }

  // A pattern in brackets, or a tuple.
  bracket() {
    if (this.takes(")")) return [];
    const first = this.union();
    if (this.takes(")")) return first;
    this.needs(",");
    return [first, ...this.list(")")];
  }

  call(name) {
    const [values, options] = [[], {}];
    while (!this.takes(")")) {
      const [sign, next] = [this.signs[this.at], this.signs[this.at + 1]];
      if (sign && "name" in sign && next && next.mark === "=") {
        this.at += 2;
        if (sign.name in options) throw new PatternError(`${name} is given ${sign.name} twice.`);
        options[sign.name] = this.union();
      } else values.push(this.union());
      if (!this.sees(")")) this.needs(",");
    }
    return makePattern(name, values, options);
  }
}

function patternOf(value) {
  if (value instanceof Pattern) return value;
  throw new PatternError("| & ~ join patterns, such as band(4, 4).");
}
