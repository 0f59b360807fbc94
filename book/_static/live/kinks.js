/* The output of a feed-forward layer with one input and n hidden features, whose bends
   stand at equal distances, beside the curve that it follows; n is the slider.
   Data: curve, the values of the curve at equal steps from 0 to 1; and weights, which
   holds for each n the n numbers of the second matrix. */
tformerLive.register("kinks", {
  controls(data) {
    return [{key: "n", label: "hidden features", min: 1, max: data.weights.length,
             step: 1, start: 4}];
  },

  // Hidden feature i bends at i / n. The output is the weighted sum of all of them.
  compute(data, {n}) {
    const output = (x) => data.weights[n - 1].reduce(
      (sum, weight, i) => sum + weight * Math.max(0, x - i / n), 0);
    const last = data.curve.length - 1;
    const values = data.curve.map((_, k) => output(k / last));
    const bends = data.weights[n - 1].map((_, i) => [i / n, output(i / n)]);
    const error = Math.max(...values.map((y, k) => Math.abs(y - data.curve[k])));
    return {values, bends, error};
  },

  draw(svg, numbers, data, settings, kit) {
    const height = 260;
    const margin = 12;
    const most = 1.15;      // the scale is the same for every n
    const across = (x) => margin + x * (kit.width - 2 * margin);
    const up = (y) => height / 2 - y * (height / 2 - margin) / most;
    const last = data.curve.length - 1;
    const path = (values) => values.map((y, k) =>
      `${k ? "L" : "M"}${across(k / last).toFixed(1)} ${up(y).toFixed(1)}`).join("");
    kit.el("line", {x1: across(0), x2: across(1), y1: up(0), y2: up(0),
                    stroke: kit.color("line")});
    kit.el("path", {d: path(data.curve), fill: "none", stroke: kit.color("gray"),
                    "stroke-width": 6, "stroke-opacity": 0.45});
    kit.el("path", {d: path(numbers.values), fill: "none", stroke: kit.color("blue"),
                    "stroke-width": 2});
    for (const [x, y] of numbers.bends)
      kit.el("circle", {cx: across(x), cy: up(y), r: 4, fill: kit.color("orange")});
    return height;
  },

  say(numbers, data, {n}) {
    const bends = n === 1 ? "one hidden feature, one bend" :
      `${n} hidden features, ${n} bends`;
    return `With ${bends}: the blue line is off the gray curve by at most ` +
      `${numbers.error.toFixed(3)}.`;
  },
});
