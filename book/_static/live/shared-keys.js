/* What a decoding step of a published model reads: its weights once, and the keys
   and values of each text, for as many key heads as the reader chooses.
   Data: bandwidth, bytes per second; memory, bytes; and models, each with its name, heads (query
   heads), kv (its own key heads), weights (bytes without the projections of keys and
   values), weightsPerHead (bytes of those projections for one key head), and
   cachePerHead (bytes that one token adds to one key head, in all layers). */
tformerLive.register("shared-keys", {
  controls(data) {
    const most = Math.max(...data.models.map((m) => m.heads));
    const values = [1, 2, 4, 8, 16, 32, 64].filter((n) => n <= most);
    return [
      {key: "model", label: "model", start: 0, choices: data.models.map((_, i) => i),
       format: (i) => data.models[i].name},
      {key: "kv", label: "key heads", values, start: 8,
       format: (kv, settings) => this.reads(kv, data.models[settings.model])},
      {key: "tokens", label: "tokens of each text",
       values: [128, 512, 2048, 8192, 32768, 131072], start: 8192,
       format: (n) => n.toLocaleString("en")},
      {key: "batch", label: "texts", values: [1, 4, 16, 64, 256], start: 16},
    ];
  },

  // More key heads than query heads there cannot be.
  reads(kv, model) {
    const n = Math.min(kv, model.heads);
    return `${n} for ${model.heads} query heads`;
  },

  compute(data, settings) {
    const model = data.models[settings.model];
    const bytes = (kv) => {
      const weights = model.weights + kv * model.weightsPerHead;
      const cache = kv * model.cachePerHead * settings.tokens * settings.batch;
      return {weights, cache, total: weights + cache};
    };
    const all = bytes(model.heads);
    const shared = bytes(Math.min(settings.kv, model.heads));
    return {all, shared, ratio: all.total / shared.total,
            fits: shared.total <= data.memory,
            ms: 1000 * shared.total / data.bandwidth};
  },

  draw(svg, numbers, data, settings, kit) {
    const model = data.models[settings.model];
    const keyHeads = (n) => `${n} key head${n === 1 ? "" : "s"}`;
    const rows = [[keyHeads(model.heads), numbers.all],
                  [keyHeads(Math.min(settings.kv, model.heads)), numbers.shared]];
    const wide = kit.width - 2;
    rows.forEach(([words, bytes], i) => {
      const y = 26 + 62 * i;
      const unit = wide / numbers.all.total;
      kit.el("text", {x: 0, y: y - 8}, `${words}: ${this.size(bytes.weights)} of ` +
        `weights, ${this.size(bytes.cache)} of cache`);
      kit.el("rect", {x: 0, y, width: unit * bytes.weights, height: 22,
                      fill: kit.color("gray")});
      kit.el("rect", {x: unit * bytes.weights, y, width: unit * bytes.cache,
                      height: 22, fill: kit.color("blue")});
    });
    return 120;
  },

  size(bytes) {
    const gb = bytes / 1e9;
    return gb < 10 ? `${gb.toFixed(1)} GB` : `${Math.round(gb).toLocaleString("en")} GB`;
  },

  say(numbers, data, settings) {
    const {name, heads} = data.models[settings.model];
    const time = numbers.fits
      ? `A step of ${name} takes ${numbers.ms.toFixed(1)} ms or more on an H100`
      : `${name} and these texts do not fit into the ${data.memory / 1e9} GB of one ` +
        `H100; reading them takes ${numbers.ms.toFixed(1)} ms or more`;
    const saved = settings.kv >= heads ? "nothing is shared"
      : `it reads ${numbers.ratio.toFixed(1)} times fewer bytes than with ` +
        "a key head for each query head";
    return `${time}, and ${saved}.`;
  },
});
