/* Which tokens of a text a layer with an indexer reads for one of them, the query, and
   how much of the attention these hold, beside the heaviest and the last so many.
   Data: words, one for each token; layer and query, those of the first view, counted
   from 0; and layers, each with two lists for each query: order, the best tokens that
   it may see by their scores, the best first, and weights, what the attention gives to
   each, in ten-thousandths. */
tformerLive.register("sparse-picks", {
  controls(data) {
    return [
      {key: "layer", label: "layer", start: data.layer, format: (i) => `${i + 1}`,
       choices: data.layers.map((_, i) => i)},
      {key: "by", label: "which tokens are read", start: "indexer",
       choices: ["indexer", "heaviest", "last"]},
      {key: "k", label: "how many, k", min: 1, max: 16, step: 1, start: 8},
      {key: "q", label: "query", min: 0, max: data.words.length - 1, step: 1,
       start: data.query, format: (q) => `“${data.words[q]}”, token ${q + 1}`},
    ];
  },

  // Of equal weights, the nearer one is heavier. Rounded weights hardly ever add up to 1.
  compute({layers}, {layer, k, q}) {
    const weights = layers[layer].weights[q];
    const near = weights.map((_, i) => q - i);
    const sum = (places) => places.reduce((total, i) => total + weights[i], 0);
    const read = {indexer: layers[layer].order[q].slice(0, k),
                  heaviest: [...near].sort((a, b) => weights[b] - weights[a]).slice(0, k),
                  last: near.slice(0, k)};
    const shares = Object.fromEntries(Object.entries(read).map(
      ([by, places]) => [by, sum(places) / sum(near)]));
    return {read, shares, n: read.last.length, seen: near.length};
  },

  name: (by, n) => `${by === "indexer" ? "indexer’s" : by} ${n === 1 ? "one" : n}`,

  // All of it is 100 %, and what would only be rounded to it is not.
  percent: (share, all) => all ? "100 %" : share < 0.005 ? "under 1 %"
    : share >= 0.995 ? "over 99 %" : `${Math.round(100 * share)} %`,

  draw(svg, {read, shares, n, seen}, data, {layer, by, q}, kit) {
    const wide = kit.width - 2;
    const words = (x, y, text, weight = 400) =>
      kit.el("text", {x, y, "font-size": 14, "font-weight": weight}, text);
    words(0, 16, "press a word; bars: the weight in the attention");
    words(0, 35, "blue, in a box: read; orange: not; thick box: query");
    const y = this.cells(data.words, data.layers[layer].weights[q], read[by], kit, wide);
    const room = wide - 184;      // beside the longest words on either side
    Object.entries(shares).forEach(([way, share], i) => {
      const top = y + 18 + 24 * i;
      const weight = way === by ? 600 : 400;
      words(0, top + 12, this.name(way, n), weight);
      kit.el("rect", {x: 96, y: top, width: room * share, height: 14,
                      fill: kit.color(way === by ? "blue" : "gray")});
      words(102 + room * share, top + 12, this.percent(share, n === seen), weight);
    });
    return y + 86;
  },

  // The words in lines, each above its bar; returns where the last line ends.
  cells(words, weights, read, kit, wide) {
    let x = 1;
    let y = 46;
    words.forEach((word, i) => {
      const query = i === weights.length - 1;
      const kind = i >= weights.length ? "later" : read.includes(i) ? "read" : "left";
      const ink = kit.color({later: "gray", read: "blue", left: "orange"}[kind]);
      const cell = kit.el("g", {class: `tf-${kind}`});
      kit.el("title", {}, `${word}: ` + (kind === "later" ? "comes later" :
        `${(weights[i] / 100).toFixed(1)} %${kind === "read" ? ", read" : ""}`), cell);
      const box = kit.el("rect", {height: 40, rx: 4, fill: kit.color("blue"),
        "fill-opacity": kind === "read" ? 0.13 : 0, "stroke-width": query ? 2.5 : 1,
        stroke: query ? kit.color("purple") : kind === "read" ? ink : "none"}, "", cell);
      const name = kit.el("text", {"text-anchor": "middle", "font-size": 14,
        "font-weight": query ? 600 : 400, fill: kind === "later" ? ink : "currentColor"},
        word, cell);
      const width = Math.max(20, name.getComputedTextLength() + 8);
      if (x + width > wide) [x, y] = [1, y + 46];
      for (const [key, at] of Object.entries({x, y, width})) box.setAttribute(key, at);
      for (const [key, at] of [["x", x + width / 2], ["y", y + 17]]) name.setAttribute(key, at);
      const height = kind === "later" ? 0 : 15 * weights[i] / Math.max(...weights);
      kit.el("rect", {x: x + 4, y: y + 37 - height, width: width - 8, height, fill: ink},
        "", cell);
      kit.press(cell, {q: i});
      x += width + 4;
    });
    return y + 40;
  },

  say({n, seen, shares}, data, {layer, by, k, q}) {
    const start = `In layer ${layer + 1},`;
    const word = `“${data.words[q]}”`;
    if (seen === 1) return `${start} ${word} may read only itself.`;
    if (n === seen)
      return `${start} ${word} may read ${n} tokens, and with k = ${k} it reads them all.`;
    const other = by === "heaviest" ? "indexer" : "heaviest";
    const held = (way) => `${n === 1 ? "holds" : "hold"} ${this.percent(shares[way])}`;
    return `${start} the ${this.name(by, n)} of ${seen} tokens ${held(by)} of the attention ` +
      `of ${word}; the ${this.name(other, n)} ${held(other)}.`;
  },
});
