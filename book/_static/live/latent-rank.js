/* What a layer keeps of each token: the key and the value of every head, or one latent
   and a rotary key that all heads share; and what a latent of that rank loses.
   Data: d_head, the numbers of a key; d_rope, the numbers of the rotary key; bytes, those
   of one number; and layers, which holds for each layer, for its first head, its first two
   heads and so on, the shares of the variance of keys and values along their principal
   directions, the largest first. */
tformerLive.register("latent-rank", {
  controls(data) {
    return [
      {key: "layer", label: "layer", start: 0, choices: data.layers.map((_, i) => i),
       format: (i) => `${i + 1}`},
      {key: "heads", label: "heads", start: 8,
       values: [1, 2, 4, 8].filter((n) => n <= data.layers[0].length)},
      {key: "rank", label: "rank of the latent", start: 32,
       values: [4, 8, 16, 32, 48, 64, 96, 128]},
    ];
  },

  shares: (data, settings) => data.layers[settings.layer][settings.heads - 1],

  // Rounded shares may add up to a little more than 1.
  compute(data, settings) {
    const shares = this.shares(data, settings);
    const kept = shares.slice(0, settings.rank).reduce((a, b) => a + b, 0);
    const separate = 2 * data.d_head * settings.heads;
    const latent = settings.rank + data.d_rope;
    return {separate, latent, ratio: separate / latent,
            lost: settings.rank >= shares.length ? 0 : Math.max(0, 1 - kept)};
  },

  // The bars of all settings have one scale: the widest belongs to all heads.
  draw(svg, numbers, data, settings, kit) {
    const wide = kit.width - 2;
    const unit = wide / (2 * data.d_head * data.layers[0].length);
    const bar = (x, y, width, height, color) =>
      kit.el("rect", {x, y, width, height, fill: kit.color(color)});
    const words = (y, text) => kit.el("text", {x: 0, y, "font-size": 14}, text);
    const size = (n) => `numbers, ${n * data.bytes} bytes`;
    words(18, `keys and values: ${numbers.separate} ${size(numbers.separate)}`);
    bar(0, 26, unit * numbers.separate, 22, "blue");
    words(80, `latent and rotary key: ${settings.rank} + ${data.d_rope} ` +
      size(numbers.latent));
    bar(0, 88, unit * settings.rank, 22, "blue");
    bar(unit * settings.rank, 88, unit * data.d_rope, 22, "orange");

    const shares = this.shares(data, settings);
    const place = wide / Math.max(...data.layers[settings.layer].map((s) => s.length));
    const kept = Math.min(settings.rank, shares.length);
    const floor = 266;      // where the bars of the directions stand
    words(146, "directions of keys and values, by size");
    words(167, `${kept} of ${shares.length} kept; heights on a square-root scale`);
    shares.forEach((share, i) => {
      const height = 84 * Math.sqrt(share / shares[0]);
      bar(place * i, floor - height, 0.75 * place, height,
        i < settings.rank ? "blue" : "gray");
    });
    kit.el("line", {x1: 0, x2: wide, y1: floor, y2: floor, stroke: "currentColor"});
    return 270;
  },

  say(numbers, data, settings) {
    const {heads, rank, layer} = settings;
    const keeps = numbers.ratio > 1
      ? `${numbers.ratio.toFixed(1)} times fewer numbers`
      : "no fewer numbers than separate keys and values do";
    const loses = numbers.lost === 0 ? "nothing"
      : numbers.lost < 0.001 ? "less than 0.1 %"
        : `${(100 * numbers.lost).toFixed(1)} %`;
    return `With ${heads} head${heads === 1 ? "" : "s"}, a latent of ${rank} keeps ` +
      `${keeps}, and loses ${loses} of what the keys and values of layer ` +
      `${layer + 1} say.`;
  },
});
