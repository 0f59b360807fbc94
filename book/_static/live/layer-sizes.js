/* The size of vectors on their way through layers of random weights, with a slider for
   the factor on all weights, and a switch for a norm before each layer.
   Data: factors, the values of the slider; start, the one to begin with; plain, the sizes
   at the start and after each layer with a factor of 1; and, if there is a switch, normed,
   the same with a norm before each layer. A layer multiplies, so other factors follow. */
tformerLive.register("layer-sizes", {
  LOW: 2 ** -24,          // the smallest number of float16 above 0
  HIGH: 65504,            // its largest
  TOP: 25,                // the scale goes from 10^-25 to 10^25

  controls(data) {
    const slider = {key: "factor", label: "all weights are multiplied by",
                    values: data.factors, start: data.start};
    return data.normed ? [slider, {key: "norm", label: "a norm before each layer",
      choices: ["no", "yes"], start: "yes"}] : [slider];
  },

  // Without norms each layer has multiplied by the factor, with them only the last one.
  compute(data, {factor, norm}) {
    const sizes = norm === "yes"
      ? data.normed.map((size, i) => (i ? factor * size : size))
      : data.plain.map((size, i) => factor ** i * size);
    const out = sizes.findIndex((size) => size > this.HIGH || size < this.LOW);
    return {sizes, out};
  },

  draw(svg, {sizes, out}, data, settings, kit) {
    const left = 50, right = 12, top = 12, high = 230;
    const last = sizes.length - 1;
    const x = (i) => left + (kit.width - left - right) * i / last;
    const y = (size) => top + high * (0.5 - Math.log10(size) / (2 * this.TOP));
    kit.el("rect", {x: left, y: y(this.HIGH), width: x(last) - left,
      height: y(this.LOW) - y(this.HIGH), fill: kit.color("gray"), "fill-opacity": 0.18});
    const words = (at, down, anchor, text, more = {}) => kit.el("text",
      {x: at, y: down, "text-anchor": anchor, "dominant-baseline": "central",
       "font-size": 13, ...more}, text);
    words(x(last) - 4, y(10 ** -4), "end", "what float16 can hold");
    for (const power of [-20, -10, 0, 10, 20]) {
      const label = words(left - 6, y(10 ** power), "end", power ? "10" : "1");
      if (power) kit.el("tspan", {dy: "-0.5em", "font-size": 12}, `${power}`.replace("-", "−"),
        label);
    }
    for (const i of [0, 10, 20, 30, 40].filter((i) => i <= last))
      words(x(i), top + high + 16, "middle", `${i}`);
    words((left + x(last)) / 2, top + high + 36, "middle", "layer");
    kit.el("path", {d: `M${left},${top}V${top + high}H${x(last)}`, fill: "none",
      stroke: "currentColor"});
    // What float16 could not hold has another color.
    const line = (from, to, color) => from < to && kit.el("path", {fill: "none",
      stroke: kit.color(color), "stroke-width": 2.5, "stroke-linejoin": "round",
      d: "M" + sizes.slice(from, to + 1).map((size, i) => `${x(from + i)},${y(size)}`)
        .join("L")});
    line(0, out < 0 ? last : out, "blue");
    if (out >= 0) line(out, last, "red");
    return top + high + 48;
  },

  number(size) {
    if (size >= 0.001 && size < 9999.5)
      return size >= 100 ? size.toFixed(0) : `${+size.toPrecision(2)}`;
    const [digits, power] = size.toExponential(1).split("e");
    const raised = [...power.replace("+", "")].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    return `${digits} · 10${raised.join("")}`;
  },

  say({sizes, out}, data, {factor, norm}) {
    const last = sizes.length - 1;
    const large = sizes[last] > 1 ? "large" : "small";
    const end = out < 0 ? "float16 can hold that."
      : `From layer ${out} on, that is too ${large} for float16.`;
    return `With weights × ${factor}${norm === "yes" ? " and norms" : ""}, the numbers have ` +
      `the size ${this.number(sizes[last])} after ${last} layers. ${end}`;
  },
});
