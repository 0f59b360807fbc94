/* Which tokens of a text can reach the last output of a model whose layers all have a
   window, through how many layers at least, and what the model writes next.
   Data: layers, how many there are; words, one for each token of the text; next, the word
   that really follows; and guesses, which holds for windows of 1, 2 and so on up to the
   whole text the likeliest next words, each with its probability, the likeliest first. */
tformerLive.register("window-reach", {
  controls(data) {
    const all = data.words.length;
    return [{key: "w", label: "window w", min: 1, max: all, step: 1, start: 8,
             format: (w) => w === all ? `${w}, the whole text` : `${w}`}];
  },

  // A token d back needs d / (w - 1) layers, rounded up; null: there are too few.
  compute(data, {w}) {
    const last = data.words.length - 1;
    const steps = data.words.map((_, i) => {
      const least = i === last ? 0 : Math.ceil((last - i) / (w - 1));
      return least <= data.layers ? least : null;
    });
    const lost = steps.filter((step) => step === null).length;
    return {steps, lost, reached: steps.length - lost};
  },

  share: (p) => p < 0.0005 ? "less than 0.1 %" : p >= 0.9995 ? "more than 99.9 %"
    : `${(100 * p).toFixed(1)} %`,

  draw(svg, numbers, data, {w}, kit) {
    const wide = kit.width - 2;
    const words = (y, text) => kit.el("text", {x: 0, y, "font-size": 14}, text);
    words(16, "below each word: the fewest layers to the last");
    words(35, "output; struck, with a dash: it cannot reach it");
    const bottom = this.chips(svg, numbers, data, kit, wide, 46);

    words(bottom + 24, "what the model would write next");
    data.guesses[w - 1].forEach(([word, p], i) => {
      const y = bottom + 50 + 40 * i;
      const right = word === data.next;
      words(y, `${word}${right ? " (as in the story)" : ""}: ${this.share(p)}`);
      kit.el("rect", {x: 0, y: y + 5, width: wide * p, height: 12,
                      fill: kit.color(right ? "green" : "orange")});
    });
    return bottom + 50 + 40 * data.guesses[w - 1].length - 16;
  },

  // The words in lines, each in a box with its number; returns where the last line ends.
  chips(svg, numbers, data, kit, wide, top) {
    let x = 1;
    let y = top;
    data.words.forEach((word, i) => {
      const step = numbers.steps[i];
      const lost = step === null;
      const chip = kit.el("g", {class: lost ? "tf-lost" : "tf-reached"});
      kit.el("title", {}, lost ? `${word}: cannot reach the last output`
        : `${word}: reaches the last output, layers needed: ${step}`, chip);
      const box = kit.el("rect", {height: 38, rx: 4, stroke: kit.color(lost ? "gray" : "blue"),
        fill: lost ? "none" : kit.color("blue"), "stroke-dasharray": lost ? "3 3" : "none",
        "fill-opacity": 0.4 * (1 - step / (data.layers + 1))}, "", chip);
      const ink = {"text-anchor": "middle", fill: lost ? kit.color("gray") : "currentColor"};
      const name = kit.el("text", {...ink, "font-size": 14,
        "text-decoration": lost ? "line-through" : "none"}, word, chip);
      const number = kit.el("text", {...ink, "font-size": 12}, lost ? "–" : `${step}`, chip);
      const width = Math.max(18, name.getComputedTextLength() + 8);
      if (x + width > wide) [x, y] = [1, y + 44];
      for (const [part, at, down] of [[box, x, 0], [name, x + width / 2, 17],
                                      [number, x + width / 2, 32]]) {
        part.setAttribute("x", at);
        part.setAttribute("y", y + down);
      }
      box.setAttribute("width", width);
      x += width + 4;
    });
    return y + 38;
  },

  say(numbers, data, {w}) {
    const all = data.words.length;
    const {lost, reached} = numbers;
    const layers = ["no", "one", "two", "three", "four", "five", "six"][data.layers];
    const tokens = w === 1 ? "1 token" : w === all ? `all ${w} tokens` : `${w} tokens`;
    const through = w === all ? "" : `, and through ${layers} layers ` +
      (lost === 0 ? `all ${all}` : w === 1 ? "no more" : `${reached}`);
    const missing = lost ? `; the first ${lost} of the ${all} cannot reach it` : "";
    const [[guess, p]] = data.guesses[w - 1];
    const wrong = guess === data.next ? "as in the story"
      : `but the story says “${data.next}”`;
    return `With a window of ${w}, the last token reads ${tokens} in each layer` +
      `${through}${missing}. Next, the model would write “${guess}” ` +
      `(${this.share(p)}), ${wrong}.`;
  },
});
