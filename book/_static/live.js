/* What all live figures share: controls, a drawing, a sentence below it.

   A figure is what tformer.plot.live writes. A file live/NAME.js calls
   tformerLive.register(NAME, definition). A definition has the functions
     controls(data): sliders {key, label, start, format, and values or min, max,
       step} and radio buttons {key, label, start, format, choices}; format(value,
       settings, data) is how a value reads
     compute(data, settings): an object of numbers; it touches no page
     draw(svg, numbers, data, settings, kit): draws, returns the height in pixels;
       kit.press(element, {key: value}) lets a press on it move that control
     say(numbers, data, settings): one sentence about what is seen
   An error in any of them leaves the still figure where it is. */
window.tformerLive = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const SILENCE = 300;    // milliseconds without a change before it is spoken
  const definitions = new Map();
  let made = 0;           // controls on this page; each has its own id

  const put = (parent, element, attributes = {}, text = "") => {
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    element.textContent = text;
    return parent.appendChild(element);
  };
  const html = (to, tag, ...rest) => put(to, document.createElement(tag), ...rest);
  const drawn = (to, tag, ...rest) =>
    put(to, document.createElementNS(NAMESPACE, tag), ...rest);

  // The values that a control offers. 0.1 + 0.2 becomes 0.3.
  const optionsOf = ({choices, values, min, max, step}) => choices || values ||
    Array.from({length: Math.round((max - min) / step) + 1},
      (_, i) => +(min + i * step).toFixed(10));

  // Both kinds of control return a function that shows option number i.
  const slider = (bar, {label, options}, choose) => {
    const id = `tf-control-${++made}`;
    const row = html(bar, "div", {class: "tf-slider"});
    html(row, "label", {for: id}, label);
    const output = html(row, "output", {for: id, "aria-live": "off"});
    const range = html(row, "input",
      {type: "range", id, min: 0, max: options.length - 1, step: 1});
    range.addEventListener("input", () => choose(+range.value));
    // A finger that scrolls the page from here has not moved the slider.
    let before = 0;
    range.addEventListener("pointerdown", () => { before = shown; });
    range.addEventListener("pointercancel", () => choose(before));
    let shown = 0;
    return (i, words) => {
      shown = i;
      range.value = i;
      range.setAttribute("aria-valuetext", words);
      output.textContent = words;
    };
  };
  const buttons = (bar, {label, options, words}, choose) => {
    const name = `tf-control-${++made}`;
    const group = html(bar, "fieldset", {class: "tf-choices"});
    html(group, "legend", {}, label);
    const inputs = options.map((option, i) => {
      const choice = html(group, "label");
      const input = html(choice, "input", {type: "radio", name});
      choice.append(words(option));
      input.addEventListener("change", () => choose(i));
      return input;
    });
    return (i) => { inputs[i].checked = true; };
  };

  const build = (figure, stage, definition) => {
    const data = JSON.parse(figure.querySelector(".tf-data").textContent);
    const settings = {};
    const live = {definition, data, settings, numbers: null};
    const bar = html(stage, "div", {class: "tf-controls"});
    const svg = drawn(stage, "svg", {role: "img"});
    // The drawing is named by the same sentence, so nobody hears it twice.
    const sentence = html(stage, "p", {class: "tf-sentence", "aria-hidden": true});
    const spoken = html(stage, "p", {class: "tf-spoken", "aria-live": "polite"});
    let width = 0;
    let waiting = 0;

    // What is pressed moves a control, and then the keyboard moves it on from there.
    const press = (element, change) => {
      element.classList.add("tf-press");
      element.addEventListener("click", () => {
        live.set(change);
        const at = controls.findIndex(({key}) => key in change);
        bar.children[at].querySelector(":checked, [type=range]").focus({preventScroll: true});
      });
    };
    const draw = () => {
      width = stage.clientWidth;
      if (!width) return;         // in a closed fold, or on paper
      svg.replaceChildren();
      const el = (name, given, text, to = svg) => drawn(to, name, given, text);
      el("desc", {}, figure.dataset.desc);
      const kit = {el, width, press, color: (name) => `var(--tf-live-${name})`};
      const height = definition.draw(svg, live.numbers, data, settings, kit);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.style.height = `${height}px`;
    };
    live.set = (changes, tell = true) => {
      for (const [key, value] of Object.entries(changes))
        if (!controls.some((c) => c.key === key && c.options.includes(value)))
          throw new RangeError(`the setting ${key} cannot be ${value}`);
      Object.assign(settings, changes);
      live.numbers = definition.compute(data, settings);
      for (const {key, options, words, show} of controls)
        show(options.indexOf(settings[key]), words(settings[key]));
      draw();
      const said = definition.say(live.numbers, data, settings);
      sentence.textContent = said;
      svg.setAttribute("aria-label", said);
      clearTimeout(waiting);
      if (tell) waiting = setTimeout(() => { spoken.textContent = said; }, SILENCE);
    };
    const controls = definition.controls(data).map((given) => {
      const control = {format: String, ...given, options: optionsOf(given)};
      control.words = (value) => control.format(value, settings, data);
      control.show = (control.choices ? buttons : slider)(bar, control,
        (i) => live.set({[control.key]: control.options[i]}));
      return control;
    });
    live.set(Object.fromEntries(controls.map((c) => [c.key, c.start])), false);
    new ResizeObserver(() => stage.clientWidth === width || draw()).observe(stage);
    figure.tformer = live;
  };

  const wake = () => {
    for (const figure of document.querySelectorAll("[data-live]:not(.tf-awake)")) {
      const definition = definitions.get(figure.dataset.live);
      if (!definition) continue;
      const stage = figure.querySelector(".tf-stage");
      stage.hidden = false;
      try {
        build(figure, stage, definition);
        figure.classList.add("tf-awake");       // live.css hides the still
      } catch (error) {
        stage.hidden = true;
        stage.replaceChildren();
        console.error(error);
      }
    }
  };
  document.addEventListener("DOMContentLoaded", wake);
  return {register(name, definition) {
    definitions.set(name, definition);
    if (document.readyState !== "loading") wake();
  }};
})();
