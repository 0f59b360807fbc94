/* Softmax of the products of one query with some keys, with two sliders: the
   width d of the vectors, and the number by which the products are divided.
   Data: words, one short word for each key; widths, the values of d; and scores,
   which holds the products for each width, one for each word. */
tformerLive.register("softmax", {
  controls(data) {
    const start = data.widths.includes(64) ? 64 : data.widths[0];
    return [
      {key: "d", label: "width of the vectors, d", values: data.widths, start},
      {key: "divisor", label: "divide the scores by",
       values: [1, 2, 4, 8, 16, 32], start: 1,
       format: (divisor, settings) => this.reads(divisor, settings.d)},
    ];
  },

  // The divisor that attention uses is marked: 8 reads "8 = √d" where d is 64.
  reads: (divisor, d) => (divisor ** 2 === d ? `${divisor} = √d` : `${divisor}`),

  // The largest score is subtracted first, so that no power overflows.
  compute(data, settings) {
    const scores = data.scores[settings.d].map((s) => s / settings.divisor);
    const most = Math.max(...scores);
    const powers = scores.map((s) => Math.exp(s - most));
    const sum = powers.reduce((a, b) => a + b, 0);
    const weights = powers.map((p) => p / sum);
    return {weights, largest: Math.max(...weights)};
  },

  draw(svg, numbers, data, settings, kit) {
    const row = 30;         // the height of a row, in pixels
    const left = 64;        // room for a word
    const right = 48;       // room for a number behind a whole bar
    const wide = kit.width - left - right;
    const height = row * data.words.length + 12;
    data.words.forEach((word, i) => {
      const weight = numbers.weights[i];
      const y = 6 + row * (i + 0.5);
      const most = weight === numbers.largest;
      kit.el("text", {x: left - 10, y, "dominant-baseline": "central",
                      "text-anchor": "end"}, word);
      kit.el("rect", {x: left, y: y - 9, width: weight * wide,
                      height: 18, rx: 1.5,
                      fill: kit.color(most ? "orange" : "blue")});
      kit.el("text", {x: left + weight * wide + 7, y,
                      "dominant-baseline": "central",
                      "font-weight": most ? 600 : 400}, weight.toFixed(2));
    });
    kit.el("line", {x1: left, x2: left, y1: 4, y2: height - 4,
                    stroke: "currentColor"});
    return height;
  },

  say(numbers, data, settings) {
    const by = this.reads(settings.divisor, settings.d);
    const does = numbers.largest > 0.9 ? "picks one word"
      : numbers.largest > 0.5 ? "leans on one word" : "mixes several words";
    return `With d = ${settings.d} and scores divided by ${by}, the largest ` +
      `weight is ${numbers.largest.toFixed(2)}: the softmax ${does}.`;
  },
});
