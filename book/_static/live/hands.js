/* The hands of rotary positions at a distance, each with the arc of angles that occurred
   in training. A hand at an angle that did not occur is red.
   Data: trained, the length of the training; distances, the values of the slider; start,
   the one to begin with; speeds, radians per position of each pair, by the name of a
   rule. The first rule is that of the training. With several, there are buttons. */
tformerLive.register("hands", {
  controls(data) {
    const slider = {key: "distance", label: "distance of the two tokens",
      values: data.distances, start: data.start, format: (n) => n.toLocaleString("en")};
    const rules = Object.keys(data.speeds);
    return rules.length < 2 ? [slider]
      : [slider, {key: "rule", label: "frequencies", choices: rules, start: rules[0]}];
  },

  compute(data, {distance, rule}) {
    const rules = Object.keys(data.speeds);
    const turn = 2 * Math.PI;
    const speeds = data.speeds[rule || rules[0]];
    const angles = speeds.map((speed) => distance * speed % turn);
    const arcs = data.speeds[rules[0]].map((speed) => Math.min(turn, data.trained * speed));
    return {angles, arcs, rounds: speeds.map((speed) => turn / speed),
      unseen: angles.map((angle, i) => angle > arcs[i])};
  },

  draw(svg, {angles, arcs, rounds, unseen}, data, settings, kit) {
    const columns = kit.width < 520 ? 4 : 6;
    const side = kit.width / columns;
    const r = Math.min(0.38 * side, 44);
    const high = 2 * r + 40;
    angles.forEach((angle, i) => {
      const x = side * (i % columns + 0.5);
      const y = high * Math.floor(i / columns) + r + 8;
      // Angles grow counterclockwise, as in the other figures of the lesson.
      const at = (a, size) => `${x + size * Math.cos(a)},${y - size * Math.sin(a)}`;
      kit.el("circle", {cx: x, cy: y, r, fill: "none", stroke: kit.color("gray")});
      const half = arcs[i] / 2;
      kit.el("path", {class: "tf-arc", fill: "none", stroke: kit.color("blue"),
        "stroke-width": 7, "stroke-opacity": 0.35,
        d: `M${at(0, r)}A${r},${r} 0 0 0 ${at(half, r)}A${r},${r} 0 0 0 ${at(2 * half, r)}`});
      kit.el("path", {class: "tf-hand", stroke: kit.color(unseen[i] ? "red" : "blue"),
        "stroke-width": 3, "stroke-linecap": "round", d: `M${x},${y}L${at(angle, 0.86 * r)}`});
      const round = Math.round(rounds[i]);
      kit.el("text", {x, y: y + r + 17, "text-anchor": "middle", "font-size": 13},
        round < 10000 ? round.toLocaleString("en") : `${Math.round(round / 1000)}k`);
    });
    return high * Math.ceil(angles.length / columns);
  },

  say({unseen}, data, {distance}) {
    const n = unseen.filter(Boolean).length;
    const what = n === 1 ? "1 hand stands at an angle" : `${n || "none"} of the ` +
      `${unseen.length} hands stand${n ? "" : "s"} at an angle`;
    return `At a distance of ${distance.toLocaleString("en")}, ${what} that did not occur ` +
      "in training.";
  },
});
