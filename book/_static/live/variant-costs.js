/* Kinds of attention in one model: what weights and cache take of a card's memory, and the
   least time of a step, which reads the weights and part of the cache, or computes longer.
   Data: tokens and texts, to choose from; start; cards, each with name, memory, bandwidth and
   flops; weights, their bytes, and flops, those of a text with them; and variants, with name,
   said (in a sentence) and parts. Of each token a part keeps bytes, and takes flops if it is
   read; at most so many tokens of a text are kept and read (kept, read), null: all. */
tformerLive.register("variant-costs", {
  controls: ({tokens, texts, cards, start}) => [
    {key: "tokens", label: "length of each text", values: tokens, start: start.tokens,
     format: (n) => `${n.toLocaleString("en")} tokens`},
    {key: "texts", label: "batch", values: texts, start: start.texts,
     format: (n) => n === 1 ? "1 text" : `${n} texts at once`},
    {key: "card", label: "card", choices: cards.map((_, i) => i), start: start.card,
     format: (i) => cards[i].name}],

  compute({cards, weights, flops, variants}, {tokens, texts, card}) {
    const {memory, bandwidth, flops: speed} = cards[card];
    return variants.map(({said, parts}) => {
      const sum = (of, most) => parts.reduce((all, part) =>
        all + texts * part[of] * Math.min(tokens, part[most] ?? tokens), 0);
      const [stored, read] = [sum("bytes", "kept"), sum("bytes", "read")];
      const total = weights + stored;
      const reading = 1000 * (weights + read) / bandwidth;
      const arithmetic = 1000 * (texts * flops + sum("flops", "read")) / speed;
      const ms = Math.max(reading, arithmetic);
      return {said, read, total, over: Math.max(0, total - memory), ms, rate: texts / ms * 1000,
              most: Math.floor(texts * (memory - weights) / stored), slow: arithmetic > reading};
    });
  },

  size: (n) => n < 99.95e9 ? `${(n / 1e9).toFixed(1)} GB` : n < 999.5e9
    ? `${(n / 1e9).toFixed(0)} GB` : `${(n / 1e12).toFixed(1)} TB`,

  // A row is one line where there is room; elsewhere its bar is below its numbers.
  draw(svg, rows, {cards, variants, weights}, {card}, {el, width, color}) {
    const {memory} = cards[card];
    const narrow = width < 500;
    const [left, right, high, step, down, foot] = narrow ? [0, width, 10, 42, 22, 334]
      : [138, width - 246, 15, 24, 4, 208];
    const unit = (right - left) / 1.5 / memory;
    const words = (x, y, text, more) => el("text", {x, y, "font-size": 14, ...more}, text);
    const cell = (i, y, text, more) =>
      words(width - [178, 124, 64, 0][i], y, text, {"text-anchor": "end", ...more});
    const bar = (x, y, wide, height, kind) => el("rect", {x, y, width: wide, height,
      ...[["gray", 1], ["blue", 1], ["blue", 0.3], ["red", 1]].map(([name, opacity]) =>
        ({fill: color(name), stroke: color(name), "fill-opacity": opacity}))[kind]});

    ["memory", "texts", "one step", "tokens/s"].forEach((text, i) => cell(i, 13, text));
    ["needed", "at most", "at least", "at most"].forEach((text, i) => cell(i, 29, text));
    ["weights", "cache that a step reads", "cache not read", "does not fit"].forEach((s, i) => {
      const [x, y] = [i % 3 ? 110 : 0, (narrow ? foot + 27 : 3) + 17 * (i > 1)];
      bar(x + 0.5, y, 11, 11, i);
      words(x + 17, y + 10, s);
    });
    rows.forEach((row, i) => {
      const y = 40 + step * i;
      const red = row.over ? {fill: color("red")} : {};
      words(0, y + 15, variants[i].name);
      cell(0, y + 15, this.size(row.total), red);
      cell(1, y + 15, row.most.toLocaleString("en"));
      if (!row.over) cell(2, y + 15, `${row.ms.toFixed(1)} ms`, row.slow
        ? {fill: color("purple"), "font-weight": 600} : {});
      cell(3, y + 15, row.over ? `${this.size(row.over)} too much`
        : Math.round(row.rate).toLocaleString("en"), red);
      const at = [0, weights, weights + row.read, row.total].map((n) => Math.min(n, memory));
      [...at.slice(1), Math.min(1.5 * memory, row.total)].forEach((to, j) => to > at[j] &&
        bar(left + unit * at[j], y + down, unit * (to - at[j]), high, j));
      el("path", {d: `M${left + unit * memory},${y + narrow * 19}v${narrow ? 16 : 24}`,
                  stroke: "currentColor", "stroke-width": 1.5});
      if (row.total > 1.5 * memory)       // two strokes across a bar that is cut off
        el("path", {d: `M${right - 16},${y + down + high}l5,-${high}m5,0l-5,${high}`,
                    stroke: "var(--pst-color-background, Canvas)", "stroke-width": 2});
    });
    words(left + unit * memory, foot + 15, `the card has ${memory / 1e9} GB`,
      {"text-anchor": "middle"});
    return foot + (narrow ? 60 : 20);
  },

  say(rows, {cards, weights}, {card}) {
    const names = (some) => some.map((r) => r.said).join(", ").replace(/, ([^,]*)$/, " and $1");
    const edge = (all, of, most) => all.filter((r) => r[of] === most(...all.map((x) => x[of])));
    const [fit, large] = [false, true].map((over) => rows.filter((r) => r.over > 0 === over));
    const [least, big] = [edge(rows, "total", Math.min), edge(fit, "total", Math.max)];
    const one = `One ${cards[card].name} has`;
    if (!fit.length)
      return `${one} room for none: with ${names(least)}, ${this.size(least[0].over)} are missing.`;
    const head = large.length && fit.length > 3 ? `no room for ${names(large)}; with the others,`
      : `room for ${large.length ? `${names(fit)} only` : "all"};`;
    const [low, high] = [Math.min, Math.max].map((most) => edge(fit, "ms", most));
    const [from, to] = [low, high].map(([row]) => `${row.ms.toFixed(1)} ms`);
    const more = big.some((r) => high.includes(r)) ? "" : `, although ${names(big)} keeps more`;
    const slow = fit.filter((row) => row.slow);
    const [few, by, other] = 2 * slow.length > fit.length
      ? [fit.filter((r) => !r.slow), "reading", "arithmetic"] : [slow, "arithmetic", "reading"];
    const why = few.length ? `, limited by ${by} with ${names(few)}, by ${other} with the others`
      : weights > 4 * high[0].read ? " and mostly reads the weights" : `, limited by ${other}`;
    return `${one} ${head} a step takes ${from}` + (from === to ? `${why}.`
      : ` (${names(low)}) to ${to} (${names(high)}${more})${why}.`);
  },
});
