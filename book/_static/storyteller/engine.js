/* A decoder of today in plain JavaScript: it turns text into tokens, computes the
   logits of the next token with a cache, and draws from them. It reads and touches no
   page, so the same file runs in a browser and elsewhere.

     const model = tformerEngine.load(config, bytes);
     const ids = [model.tokenizer.end, ...model.tokenizer.encode("Once there was")];
     for (const id of ids) logits = model.step(id);

   The weights are what book/_ext/storyteller.py writes: a matrix is one float32 scale
   for each row and then one whole number of a byte for each weight, a vector is float32.
   tests/test_storyteller.py compares tokens, logits, attention, filters and text with
   the package. */
var tformerEngine = (() => {
  "use strict";

  // ---- vectors and matrices

  const reader = (bytes) => {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    let at = 0;
    const vector = (n) => {
      const out = Float32Array.from({length: n}, (_, i) => view.getFloat32(at + 4 * i, true));
      at += 4 * n;
      return out;
    };
    const matrix = (rows, columns) => {
      const scale = vector(rows);
      const weights = new Float32Array(rows * columns);
      for (let i = 0; i < weights.length; i++)
        weights[i] = view.getInt8(at + i) * scale[Math.floor(i / columns)];
      at += weights.length;
      return {rows, columns, weights};
    };
    return {vector, matrix, left: () => bytes.length - at};
  };

  const linear = ({rows, columns, weights}, x) => {       // (columns) -> (rows)
    const y = new Float32Array(rows);
    for (let r = 0, i = 0; r < rows; r++) {
      let a = 0, b = 0, c = 0, d = 0;   // four sums, so that no addition waits for another
      for (let j = 0; j < columns; j += 4, i += 4) {
        a += weights[i] * x[j];
        b += weights[i + 1] * x[j + 1];
        c += weights[i + 2] * x[j + 2];
        d += weights[i + 3] * x[j + 3];
      }
      y[r] = a + b + c + d;
    }
    return y;
  };

  const add = (x, y) => x.forEach((_, i) => { x[i] += y[i]; });

  const rmsNorm = (x, weight, eps) => {
    const square = x.reduce((sum, value) => sum + value * value, 0) / x.length;
    return x.map((value, i) => value / Math.sqrt(square + eps) * weight[i]);
  };

  const softmax = (scores) => {
    const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
    const weights = Float64Array.from(scores, (score) => Math.exp(score - largest));
    const sum = weights.reduce((a, b) => a + b, 0);
    return weights.map((weight) => weight / sum);
  };

  // ---- text and tokens: byte-pair encoding (lesson 2)

  const makeTokenizer = ({merges, pattern, end}) => {
    // Each byte has a letter, as in GPT-2's files, so that a token is a string.
    const letters = [];
    for (let byte = 0, spare = 256; byte < 256; byte++) {
      const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
      letters.push(String.fromCodePoint(printable ? byte : spare++));
    }
    const byteOf = new Map(letters.map((letter, byte) => [letter, byte]));
    const tokens = [...letters, ...merges.map((pair) => pair.replace(" ", ""))];
    const idOf = new Map(tokens.map((token, id) => [token, id]));
    const rankOf = new Map(merges.map((pair, rank) => [pair, rank]));
    const pieces = new RegExp(pattern, "gu");

    const encodePiece = (piece) => {
      let parts = [...new TextEncoder().encode(piece)].map((byte) => letters[byte]);
      for (;;) {
        const ranks = parts.slice(1).map((right, i) => rankOf.get(`${parts[i]} ${right}`));
        const best = Math.min(...ranks.filter((rank) => rank !== undefined));
        if (best === Infinity) return parts.map((part) => idOf.get(part));
        const merged = [];
        for (let i = 0; i < parts.length; i++)
          merged.push(`${parts[i]} ${parts[i + 1]}` === merges[best]
            ? parts[i] + parts[++i] : parts[i]);
        parts = merged;
      }
    };
    const bytesOf = (id) => id === end ? [] : [...tokens[id]].map((c) => byteOf.get(c));
    return {
      end,
      encode: (text) => (text.match(pieces) || []).flatMap(encodePiece),
      // the words of a text, each with its tokens
      words: (text) => (text.match(pieces) || []).map((word) => [word, encodePiece(word)]),
      decode: (ids) => new TextDecoder().decode(Uint8Array.from(ids.flatMap(bytesOf))),
    };
  };

  // ---- the model (lesson 13), one token at a time, with a cache (lesson 21)

  const load = (config, bytes) => {
    const {d_model: d, n_layers, n_heads, n_kv_heads, d_ff, vocab_size, eps} = config;
    const dHead = d / n_heads;
    const group = n_heads / n_kv_heads;     // queries that share a key
    const {vector, matrix, left} = reader(bytes);
    const embed = matrix(vocab_size, d);    // the output layer has the same weights
    const blocks = Array.from({length: n_layers}, () => ({
      attentionNorm: vector(d),
      q: matrix(d, d), k: matrix(n_kv_heads * dHead, d), v: matrix(n_kv_heads * dHead, d),
      o: matrix(d, d),
      feedForwardNorm: vector(d),
      gate: matrix(d_ff, d), up: matrix(d_ff, d), down: matrix(d, d_ff),
    }));
    const finalNorm = vector(d);
    if (left() !== 0) throw new Error(`the weights have ${left()} bytes too many`);

    const rotate = (x, position) => {       // in place, each head (lesson 5)
      const half = dHead / 2;
      for (let head = 0; head < x.length; head += dHead)
        for (let i = 0; i < half; i++) {
          const angle = position * config.rope_theta ** (-i / half);
          const a = x[head + i], b = x[head + half + i];
          x[head + i] = a * Math.cos(angle) - b * Math.sin(angle);
          x[head + half + i] = b * Math.cos(angle) + a * Math.sin(angle);
        }
      return x;
    };

    // What a layer's attention gives its newest token; the weights of each head go
    // into `seen`.
    const attend = (x, layer, seen, {cache, off}) => {
      const {keys, values} = cache[layer];
      const {q, k, v, o} = blocks[layer];
      const position = keys.length;
      const queries = rotate(linear(q, x), position);
      keys.push(rotate(linear(k, x), position));
      values.push(linear(v, x));
      const out = new Float32Array(d);
      for (let head = 0; head < n_heads; head++) {
        const query = head * dHead, shared = Math.floor(head / group) * dHead;
        const weights = softmax(keys.map((key) => {
          let score = 0;
          for (let i = 0; i < dHead; i++) score += queries[query + i] * key[shared + i];
          return score / Math.sqrt(dHead);
        }));
        seen.push(weights);
        if (off.has(layer * n_heads + head)) continue;
        values.forEach((value, token) => {
          for (let i = 0; i < dHead; i++) out[query + i] += weights[token] * value[shared + i];
        });
      }
      return linear(o, out);
    };

    const feedForward = (x, {gate, up, down}) => {
      const opened = linear(gate, x);
      return linear(down, linear(up, x).map((value, i) =>
        value * opened[i] / (1 + Math.exp(-opened[i]))));
    };

    // A text of its own, read with the same weights.
    const tokenizer = makeTokenizer(config);
    const begin = () => {
      const off = new Set();                // heads that give nothing, 0 to 15
      const cache = blocks.map(() => ({keys: [], values: []}));
      const crop = (n) => cache.forEach(({keys, values}) => { keys.length = values.length = n; });

      // The logits of the token after `id`. `seen` gets the weights of all heads.
      const step = (id, seen = []) => {
        const x = embed.weights.slice(id * d, (id + 1) * d);
        blocks.forEach((block, layer) => {
          add(x, attend(rmsNorm(x, block.attentionNorm, eps), layer, seen, {cache, off}));
          add(x, feedForward(rmsNorm(x, block.feedForwardNorm, eps), block));
        });
        return linear(embed, rmsNorm(x, finalNorm, eps));
      };
      return {config, tokenizer, step, crop, off, begin,
        get length() { return cache[0].keys.length; }};
    };
    return begin();
  };

  // ---- from logits to a choice (lesson 20)

  // The probabilities after temperature, top-k, top-p and min-p, in this order; what
  // is cut has 0. A temperature of 0 leaves the likeliest token.
  const distribution = (logits, {temperature = 1, topK = 0, topP = 1, minP = 0} = {}) => {
    const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
    if (temperature === 0) {
      const first = logits.indexOf(largest);
      return Float64Array.from(logits, (_, i) => +(i === first));
    }
    let z = Float64Array.from(logits, (logit) => logit / temperature);
    const keep = (least) => { z = z.map((value) => value >= least ? value : -Infinity); };
    const sorted = () => [...z].sort((a, b) => b - a);
    if (topK > 0 && topK < z.length) keep(sorted()[topK - 1]);
    if (topP < 1) {
      const ranked = sorted(), p = softmax(ranked);
      let held = 0, last = 0;
      while (last < p.length && held < topP) held += p[last++];
      keep(ranked[last - 1]);
    }
    if (minP > 0) keep(largest / temperature + Math.log(minP));
    return softmax(z);
  };

  // The token in whose piece of the line from 0 to 1 the number u falls.
  const draw = (probabilities, u) => {
    let end = 0, last = 0;
    for (let id = 0; id < probabilities.length; id++) {
      if (probabilities[id] === 0) continue;
      last = id;
      end += probabilities[id];
      if (u < end) return id;
    }
    return last;                            // u = 1, up to rounding
  };

  return {load, distribution, draw, softmax};
})();
