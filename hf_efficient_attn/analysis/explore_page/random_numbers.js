// Python's random.Random, number for number: MT19937, seeded with a text through SHA-512, or as numpy's RandomState.

const WORD = (1n << 64n) - 1n;

// The integer root of a number, by Newton's method.
function integerRoot(number, degree) {
  const power = BigInt(degree);
  let root = 1n << (BigInt(number.toString(2).length) / power + 1n);
  for (;;) {
    const next = ((power - 1n) * root + number / root ** (power - 1n)) / power;
    if (next >= root) return root;
    root = next;
  }
}

// The constants of SHA-512 are the fractions of square and cube roots of the first primes.
const PRIMES = [];
for (let number = 2; PRIMES.length < 80; number++) {
  if (PRIMES.every((prime) => number % prime)) PRIMES.push(number);
}
const SHA_START = PRIMES.slice(0, 8).map((prime) => integerRoot(BigInt(prime) << 128n, 2) & WORD);
const SHA_ROUNDS = PRIMES.map((prime) => integerRoot(BigInt(prime) << 192n, 3) & WORD);

function rotated(word, bits) {
  return ((word >> BigInt(bits)) | (word << BigInt(64 - bits))) & WORD;
}

function sha512(bytes) {
  const length = Math.ceil((bytes.length + 17) / 128) * 128;
  const padded = new Uint8Array(length);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(length - 8, BigInt(8 * bytes.length));
  let state = SHA_START;
  for (let at = 0; at < length; at += 128) state = compressed(state, view, at);
  const digest = new DataView(new ArrayBuffer(64));
  state.forEach((word, index) => digest.setBigUint64(8 * index, word));
  return new Uint8Array(digest.buffer);
}

function compressed(state, view, at) {
  const words = [];
  for (let i = 0; i < 80; i++) {
    if (i < 16) {
      words.push(view.getBigUint64(at + 8 * i));
      continue;
    }
    const [w15, w2] = [words[i - 15], words[i - 2]];
    const small0 = rotated(w15, 1) ^ rotated(w15, 8) ^ (w15 >> 7n);
    const small1 = rotated(w2, 19) ^ rotated(w2, 61) ^ (w2 >> 6n);
    words.push((words[i - 16] + small0 + words[i - 7] + small1) & WORD);
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 80; i++) {
    const large1 = rotated(e, 14) ^ rotated(e, 18) ^ rotated(e, 41);
    const sum1 = h + large1 + ((e & f) ^ (~e & WORD & g)) + SHA_ROUNDS[i] + words[i];
    const large0 = rotated(a, 28) ^ rotated(a, 34) ^ rotated(a, 39);
    const sum2 = large0 + ((a & b) ^ (a & c) ^ (b & c));
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + sum1) & WORD, c, b, a, (sum1 + sum2) & WORD];
  }
  return [a, b, c, d, e, f, g, h].map((word, index) => (word + state[index]) & WORD);
}

class MersenneTwister {
  // As numpy.random.RandomState(seed).
  constructor(seed) {
    this.state = new Uint32Array(624);
    this.state[0] = seed;
    for (let i = 1; i < 624; i++) {
      const before = this.state[i - 1];
      this.state[i] = Math.imul(1812433253, before ^ (before >>> 30)) + i;
    }
    this.next = 624;
  }

  // As random.Random(text).
  static ofText(text) {
    const bytes = new TextEncoder().encode(text);
    const all = [...bytes, ...sha512(bytes)].reverse();
    const key = new Uint32Array(Math.ceil(all.length / 4));
    all.forEach((byte, index) => (key[index >> 2] |= byte << (8 * (index & 3))));
    const generator = new MersenneTwister(19650218);
    generator.mix(key);
    return generator;
  }

  mix(key) {
    const { state } = this;
    let i = 1;
    const step = (factor, added) => {
      const before = state[i - 1];
      state[i] = (state[i] ^ Math.imul(before ^ (before >>> 30), factor)) + added();
      if (++i < 624) return;
      state[0] = state[623];
      i = 1;
    };
    for (let count = 0; count < Math.max(624, key.length); count++) {
      step(1664525, () => key[count % key.length] + (count % key.length));
    }
    for (let count = 0; count < 623; count++) step(1566083941, () => -i);
    state[0] = 0x80000000;
  }

  bits32() {
    if (this.next === 624) this.twist();
    let word = this.state[this.next++];
    word ^= word >>> 11;
    word ^= (word << 7) & 0x9d2c5680;
    word ^= (word << 15) & 0xefc60000;
    return (word ^ (word >>> 18)) >>> 0;
  }

  twist() {
    const { state } = this;
    for (let i = 0; i < 624; i++) {
      const word = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
      state[i] = state[(i + 397) % 624] ^ (word >>> 1) ^ (word & 1 ? 0x9908b0df : 0);
    }
    this.next = 0;
  }

  // From 0 to 1, with 53 bits.
  random() {
    const high = this.bits32() >>> 5;
    return (high * 67108864 + (this.bits32() >>> 6)) / 9007199254740992;
  }

  // From 0 to `limit`, as numpy's legacy shuffle draws it.
  atMost(limit) {
    const mask = 2 ** limit.toString(2).length - 1;
    for (;;) {
      const value = (this.bits32() & mask) >>> 0;
      if (value <= limit) return value;
    }
  }

  permutation(values) {
    const shuffled = [...values];
    for (let last = shuffled.length - 1; last > 0; last--) {
      const place = this.atMost(last);
      [shuffled[last], shuffled[place]] = [shuffled[place], shuffled[last]];
    }
    return shuffled;
  }
}
