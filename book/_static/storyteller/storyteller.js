/* The storyteller in a page: its tokens, its heads, the next token, and what the settings
   of sampling do. engine.js computes; this file shows.

   A figure is what book/_ext/storyteller.py writes: <figure data-storyteller="KIND"> with
   a stage that is empty, and a still that stays on paper and without scripts. KIND is
     story     all there is: one types a beginning and lets the model go on
     heads     one text; its heads can be switched off
     sampling  one place in a text; settings, and three texts that go on from it
   The weights are loaded once: when a figure is within one screen, the connection is
   quick and the browser has nothing else to do, or when its button is pressed. */
window.tformerStoryteller = (() => {
  "use strict";
  const HERE = document.currentScript.src.replace(/[^/]*$/, "");
  const PAUSE = 60;       // milliseconds between two tokens that are written
  const SILENCE = 400;    // milliseconds without a change before it is spoken
  const LONGEST = 160;    // tokens of a beginning, so that there is room for a story
  const LETTERS = 800;    // of a beginning
  const CHANGE = 0.01;    // a smaller one is called none
  const KNOWN = "girl, boy, kite, ball, park";
  const percent = (p) => (p > 0.9995 && p < 1 ? "> 99.9" : p > 0 && p < 0.0005 ? "< 0.1"
    : (100 * p).toFixed(p === 1 ? 0 : 1)) + "\u00a0%";
  const whole = (p) => (p > 0.995 && p < 1 ? "> 99" : (100 * p).toFixed(0)) + "\u00a0%";
  const list = (words) => words.length < 2 ? words.join("")
    : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

  const make = (parent, tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    element.textContent = text;
    return parent.appendChild(element);
  };
  const button = (parent, text, press, attributes = {}) => {
    const made = make(parent, "button", {type: "button", ...attributes}, text);
    made.addEventListener("click", press);
    return made;
  };

  // Several of which one is chosen: one stop for the tab key, arrows between them.
  const chooser = (group, label, columns, choose) => {
    group.setAttribute("role", "radiogroup");
    group.setAttribute("aria-label", label);
    const items = () => [...group.querySelectorAll("[role=radio]")];
    group.addEventListener("click", (event) => {
      const i = items().indexOf(event.target.closest("[role=radio]"));
      if (i >= 0) choose(i);
    });
    group.addEventListener("keydown", (event) => {
      const all = items(), at = all.indexOf(document.activeElement);
      const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
        Home: -at, End: all.length - 1 - at, Enter: 0, " ": 0}[event.key];
      if (at < 0 || by === undefined) return;
      event.preventDefault();
      const to = Math.min(Math.max(at + by, 0), all.length - 1);
      all[to].focus();
      choose(to);
    });
    return (chosen) => items().forEach((item, i) => {
      item.setAttribute("aria-checked", i === chosen);
      item.tabIndex = i === chosen ? 0 : -1;
    });
  };

  // Numbers between 0 and 1, the same ones for the same seed (mulberry32).
  const randomNumbers = (start) => {
    let seed = Math.imul(start, 0x9e3779b9);    // neighbors begin far apart
    return () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  };

  // ---- a text that a model reads and writes; it touches no page

  const makeReader = (model) => {
    const {end} = model.tokenizer;
    const text = {model, ids: [], seen: [], logits: [], given: 0, isCut: false};
    text.feed = (id) => {
      const seen = [];
      const began = performance.now();
      text.logits.push(model.step(id, seen));
      text.milliseconds = performance.now() - began;
      text.seen.push(seen);
      text.ids.push(id);
    };
    text.crop = (n) => {
      model.crop(n);
      text.ids.length = text.seen.length = text.logits.length = n;
    };
    text.follow = (ids) => {        // what both texts begin with is kept
      let same = 0;
      while (same < ids.length && ids[same] === text.ids[same]) same++;
      text.crop(same);
      ids.slice(same).forEach(text.feed);
    };
    text.read = (words) => {
      const ids = [end, ...model.tokenizer.encode(words)];
      text.isCut = ids.length > LONGEST;
      text.follow(ids.slice(0, LONGEST));
      text.given = text.ids.length;
    };
    text.turn = (head) => {         // switch a head off or on, and read it all again
      if (!model.off.delete(head)) model.off.add(head);
      const ids = [...text.ids];
      text.crop(0);
      ids.forEach(text.feed);
    };
    text.hasEnded = () => text.ids.length > 1 && text.ids.at(-1) === end;
    text.isFull = () => text.ids.length >= model.config.max_len || text.hasEnded();
    text.beginning = () => model.tokenizer.decode(text.ids.slice(0, text.given));
    text.show = (id) => id === end ? "the end" : model.tokenizer.decode([id]).trim() || "a space";
    return text;
  };

  // ---- the parts of a stage; each returns a function that draws it anew

  const tokenRow = (parent, state, refresh) => {
    const row = make(parent, "div", {class: "tf-tokens"});
    const {text} = state;
    const spans = [];
    const mark = chooser(row, "tokens of the text", 1, (i) => {
      state.here = i + 1;
      refresh();
    });
    return () => {
      while (spans.length > text.ids.length - 1) spans.pop().remove();
      text.ids.slice(1).forEach((id, i) => {
        spans[i] = spans[i] || make(row, "span", {role: "radio"});
        const words = id === text.model.tokenizer.end
          ? " ∎" : text.model.tokenizer.decode([id]);
        if (spans[i].textContent !== words) spans[i].textContent = words;
        spans[i].classList.toggle("tf-given", i + 1 < text.given);
        const weight = state.seen()[i + 1] || 0;
        spans[i].style.setProperty("--tf-weight", weight.toFixed(3));
      });
      mark(state.here - 1);
    };
  };

  const headGrid = (parent, state, refresh) => {
    const {text} = state;
    const {n_layers, n_heads} = text.model.config;
    const box = make(parent, "div");
    const grid = make(box, "div", {class: "tf-heads", style: `--tf-columns: ${n_heads}`});
    make(grid, "i", {"aria-hidden": true});     // the corner
    for (let head = 1; head <= n_heads; head++)
      make(grid, "i", {"aria-hidden": true}, head === 1 ? "head 1" : head);
    const cells = [];
    for (let layer = 0; layer < n_layers; layer++) {
      make(grid, "i", {"aria-hidden": true}, layer ? layer + 1 : "layer 1");
      for (let head = 0; head < n_heads; head++) {
        const cell = make(grid, "span",
          {role: "radio", "aria-label": `head ${head + 1} of layer ${layer + 1}`});
        make(cell, "canvas");
        make(cell, "b");
        cells.push(cell);
      }
    }
    const mark = chooser(grid, "heads", n_heads, (i) => {
      state.head = i;
      refresh();
    });
    const hint = make(box, "p", {class: "tf-label tf-hint"});
    const bar = make(box, "div", {class: "tf-bar"});
    const turn = button(bar, "", () => {
      state.stop();
      text.turn(state.head);
      refresh(true);
    }, {class: "tf-turn"});
    const allOn = button(bar, "All on", () => {
      state.stop();
      text.model.off.clear();
      const ids = [...text.ids];
      text.crop(0);
      text.follow(ids);
      refresh(true);
      turn.focus();       // this button goes away
    });
    let painted = [];       // the rows of weights that the pictures show
    return (afresh) => {
      const size = 8 * Math.ceil((text.seen.length + 1) / 8);
      const same = text.seen.findIndex((row, i) => row !== painted[i]);
      const kept = same < 0 ? text.seen.length : same;
      const whole = afresh || cells[0].firstChild.width !== size || kept < painted.length;
      const ink = getComputedStyle(grid).getPropertyValue("--tf-ink");
      cells.forEach((cell, head) => {
        const canvas = cell.firstChild;
        if (whole) canvas.width = canvas.height = size;     // this clears it
        const pen = canvas.getContext("2d");
        text.seen.slice(whole ? 0 : kept).forEach((row, i) => row[head].forEach((weight, j) => {
          if (weight < 0.02) return;
          pen.fillStyle = `rgba(${ink}, ${Math.sqrt(weight)})`;
          pen.fillRect(j, i + (whole ? 0 : kept), 1, 1);
        }));
        cell.lastChild.style.top = `${100 * state.here / size}%`;
        cell.classList.toggle("tf-off", text.model.off.has(head));
        const off = text.model.off.has(head) ? ", switched off" : "";
        cell.setAttribute("aria-label", state.nameOf(head) + off);
      });
      painted = [...text.seen];
      mark(state.head);
      turn.textContent = `Switch ${text.model.off.has(state.head) ? "on" : "off"} ` +
        `head ${state.head % n_heads + 1} of layer ${Math.floor(state.head / n_heads) + 1}`;
      allOn.hidden = text.model.off.size === 0;
      const isFirst = state.isFirst() && state.here === text.ids.length - 1;
      hint.textContent = text.model.off.size ? "The dotted outlines are those of all heads."
        : isFirst ? `Switch the marked head off and watch “${state.likeliest()}”.`
        : "Choose a head and switch it off.";
    };
  };

  // The likeliest tokens as bars. What the settings cut is pale.
  const nextTokens = (parent, state, rows, choose) => {
    const label = make(parent, "p", {class: "tf-label"});
    const list = make(parent, "ol", {class: "tf-next"});
    const bars = Array.from({length: rows}, (_, i) => {
      const item = make(list, "li");
      const bar = choose ? button(item, "", () => choose(bars[i].id)) : make(item, "div");
      const word = make(bar, "b"), room = make(bar, "span");
      return {bar, word, length: make(room, "i"), ghost: make(room, "s"),
        share: make(bar, "em"), id: 0};
    });
    const say = () => {
      const {text, here} = state;
      const behind = text.ids.length - 1 - here;
      if (text.hasEnded() && !behind) return "The story has ended: nothing comes next.";
      if (text.isFull() && !behind) return "The model has no room for another token.";
      const after = here ? `“${text.show(text.ids[here])}”` : "the start";
      if (!choose) return `The next token after ${after}.`;
      return behind ? `What may come after ${after}. Press one, and it ` +
        `replaces the ${behind === 1 ? "token" : `${behind} tokens`} behind.`
        : "What may come next. Press one to choose it.";
    };
    return () => {
      const {text} = state;
      const words = say();
      if (label.textContent !== words) state.link(label, words, "next", choose && "20_sampling");
      const over = text.isFull() && state.here === text.ids.length - 1;
      list.classList.toggle("tf-over", over);
      const logits = text.logits[state.here];
      const all = state.withAllHeads();
      const before = tformerEngine.softmax(logits);
      const p = tformerEngine.distribution(logits, state.settings);
      const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a]);
      bars.forEach((row, i) => {
        row.id = order[i];
        row.word.textContent = text.show(row.id);
        row.length.style.width = `${100 * (p[row.id] || before[row.id])}%`;
        row.share.textContent = p[row.id] ? percent(p[row.id]) : "cut";
        row.bar.classList.toggle("tf-cut", p[row.id] === 0);
        row.bar.disabled = over;
        row.ghost.hidden = !all || all[row.id] < CHANGE;
        if (all) row.ghost.style.width = `${100 * all[row.id]}%`;
      });
      state.next = {likeliest: order[0], p, left: p.reduce((n, value) => n + (value > 0), 0)};
    };
  };

  const slider = (parent, state, refresh, {key, label, values, say}) => {
    const row = make(parent, "label", {class: "tf-setting"});
    make(row, "span", {}, label);
    const output = make(row, "output", {"aria-live": "off"});
    const range = make(row, "input",
      {type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": label});
    const show = () => {
      output.textContent = say(state.settings[key]);
      range.setAttribute("aria-valuetext", output.textContent);
    };
    range.value = values.indexOf(state.settings[key]);
    range.addEventListener("input", () => {
      state.settings[key] = values[+range.value];
      show();
      refresh();
    });
    show();
  };
  const TEMPERATURE = {key: "temperature", label: "temperature",
    values: Array.from({length: 21}, (_, i) => i / 10),
    say: (t) => t ? t.toFixed(1) : "0: always the likeliest"};
  const TOP_K = {key: "topK", label: "top-k", values: [1, 2, 3, 5, 8, 12, 20, 40, 0],
    say: (k) => k ? `the ${k} likeliest` : "all tokens"};
  const TOP_P = {key: "topP", label: "top-p",
    values: [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1],
    say: (p) => p < 1 ? `until they hold ${p}` : "all tokens"};
  const MIN_P = {key: "minP", label: "min-p", values: [0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5],
    say: (p) => p ? `at least ${p} of the likeliest` : "all tokens"};

  // ---- the stages

  const STAGES = {};

  // What the model does not know of a text, or what it knows.
  const notices = (text, words) => {
    if (text.isCut) return `Only the first ${LONGEST - 1} tokens are read, so that there is ` +
      "room for a story.";
    const {encode, words: cut} = text.model.tokenizer;
    const strange = cut(words).filter(([word, ids]) => ids.length > 1 && word.trim());
    if (!strange.length) return `It knows the words of its stories, such as ${KNOWN}.`;
    const [piece, ids] = strange[0];
    const word = piece.trim(), inside = ` ${word.toLowerCase()}`;
    const how = /[^\0-\x7f]/.test(word) ? `reads its ${new TextEncoder().encode(word).length} bytes one by one`
      : `spells it: ${ids.map((id) => text.show(id)).filter((part) => part !== "a space").join("·")}`;
    const others = strange.length - 1;
    return `It does not know “${word}”${encode(inside).length === 1 ? " at this place" : ""} and ${how}.` +
      (others ? ` ${others} other${others > 1 ? "s" : ""} too.` : "") + ` It knows ${KNOWN} …`;
  };

  STAGES.story = (stage, state, refresh) => {
    const {text} = state;
    const bar = make(stage, "form", {class: "tf-bar"});
    const field = make(bar, "input", {type: "text", maxlength: LETTERS, spellcheck: false,
      autocomplete: "off", enterkeyhint: "go", "aria-label": "the beginning of a story"});
    field.value = state.start;
    let writing = 0;
    const begin = (words) => {
      state.stop();
      if (words.length > LETTERS) field.value = words = words.slice(0, LETTERS);
      text.read(words);
      state.here = text.ids.length - 1;
      refresh();
    };
    const write = () => {
      if (text.isFull()) begin(field.value);
      writing = setTimeout(next, 0);
      refresh();
    };
    const go = make(bar, "button", {type: "submit", class: "tf-go"}, "Write");
    bar.addEventListener("submit", (event) => {     // by the button, or by Enter
      event.preventDefault();
      if (writing) state.stop(); else write();
      refresh();
    });
    const one = () => {
      const p = tformerEngine.distribution(text.logits.at(-1), state.settings);
      text.feed(tformerEngine.draw(p, Math.random()));
      state.here = text.ids.length - 1;
    };
    const next = () => {
      one();
      if (text.isFull()) state.stop(); else writing = setTimeout(next, PAUSE);
      refresh();
    };
    state.stop = () => {
      clearTimeout(writing);
      writing = 0;
    };
    state.isSilent = () => writing > 0;
    const oneToken = button(bar, "One token", () => {
      state.stop();
      if (!text.isFull()) one();
      refresh();
    });
    const own = () => {             // the field has what the reader gave, and no more
      field.value = text.beginning();
      state.here = text.ids.length - 1;
      text.isCut = false;
      refresh();
    };
    button(bar, "Take one back", () => {
      state.stop();
      if (text.ids.length > 1) text.crop(text.ids.length - 1);
      text.given = Math.min(text.given, text.ids.length);
      own();
    });
    field.addEventListener("input", () => begin(field.value));
    const notice = make(stage, "p", {class: "tf-label tf-notice"});
    const chips = make(stage, "div", {class: "tf-bar tf-chips"});
    for (const words of state.beginnings)
      button(chips, words, () => {
        begin(field.value = words);
        write();
      }, {title: words});
    new ResizeObserver(() => {      // a row that scrolls has a name, and the keys reach it
      const scrolls = chips.scrollWidth > chips.clientWidth + 1;
      const said = {role: "region", "aria-label": "beginnings", tabindex: 0};
      for (const name in said)
        if (scrolls) chips.setAttribute(name, said[name]); else chips.removeAttribute(name);
    }).observe(chips);
    const back = button(chips, "First text", () => begin(field.value = state.start));

    state.label(stage, "text");
    const tokens = tokenRow(stage, state, refresh);
    const columns = make(stage, "div", {class: "tf-columns"});
    const first = make(columns, "div"), second = make(columns, "div", {class: "tf-side"});
    const likely = nextTokens(first, state, 8, (id) => {
      state.stop();
      text.crop(state.here + 1);
      if (!text.isFull()) text.feed(id);
      text.given = text.ids.length;         // what one chooses is part of the beginning
      own();
    });
    state.label(second, "maps");
    const heads = headGrid(second, state, refresh);
    state.sentence = make(columns, "p", {class: "tf-sentence", "aria-hidden": true});
    const settings = make(columns, "div", {class: "tf-settings"});
    slider(settings, state, refresh, TEMPERATURE);
    slider(settings, state, refresh, TOP_K);
    return [tokens, likely, heads, () => {
      notice.textContent = notices(text, field.value);
      go.textContent = writing ? "Stop" : text.isFull() ? "Write another" : "Write";
      oneToken.disabled = text.isFull();
      back.disabled = state.isFirst();
    }];
  };

  STAGES.heads = (stage, state, refresh) => {
    const tokens = tokenRow(stage, state, refresh);
    const columns = make(stage, "div", {class: "tf-columns"});
    const first = make(columns, "div"), second = make(columns, "div", {class: "tf-side"});
    const next = nextTokens(first, state, 8);
    state.label(second, "maps");
    const heads = headGrid(second, state, refresh);
    state.sentence = make(columns, "p", {class: "tf-sentence", "aria-hidden": true});
    return [tokens, next, heads];
  };

  STAGES.sampling = (stage, state, refresh) => {
    const {text} = state;
    make(stage, "p", {class: "tf-written tf-given"}, `${state.start} …`);
    const settings = make(stage, "div", {class: "tf-settings"});
    for (const one of [TEMPERATURE, TOP_K, TOP_P, MIN_P])
      slider(settings, state, refresh, one);
    const columns = make(stage, "div", {class: "tf-columns tf-even"});
    const left = make(columns, "div"), right = make(columns, "div");
    const next = nextTokens(left, state, 12);
    state.label(right, "texts");
    const texts = [1, 2, 3].map(() => make(right, "p", {class: "tf-written"}));
    let seed = 1;
    button(right, "Other random numbers", () => {
      seed += 3;
      refresh();
    });
    const n = text.ids.length;
    const write = () => {
      texts.forEach((paragraph, i) => {
        const u = randomNumbers(seed + i);
        while (text.ids.length < n + 40 && !text.isFull())
          text.feed(tformerEngine.draw(
            tformerEngine.distribution(text.logits.at(-1), state.settings), u()));
        paragraph.textContent = `…${text.model.tokenizer.decode(text.ids.slice(n))}`;
        text.crop(n);
      });
    };
    state.sentence = make(stage, "p", {class: "tf-sentence", "aria-hidden": true});
    let waiting = 0;
    return [next, () => {
      clearTimeout(waiting);
      waiting = setTimeout(write, PAUSE);
    }];
  };

  // One sentence about what is seen, for eyes and for ears.
  const SENTENCES = {
    story: (state) => `${SENTENCES.next(state)} ${SENTENCES.looks(state)}`,
    heads: (state) => SENTENCES.story(state),
    next: (state) => {
      const {text, here, next} = state;
      if (here === 0) return "The text is empty.";
      if (text.ids[here] === text.model.tokenizer.end) return "The story ends here.";
      const now = next.likeliest, all = state.withAllHeads();
      const share = (id, p) => `“${text.show(id)}” ${percent(p[id])}`;
      if (!all) return `After “${text.show(text.ids[here])}”, the likeliest next token is ` +
        `“${text.show(now)}” with ${percent(next.p[now])}.`;
      const off = list([...text.model.off].sort((a, b) => a - b).map(state.nameOf));
      const before = all.indexOf(Math.max(...all));
      const change = Math.abs(all[before] - next.p[before]);
      const found = [now, ...(now === before ? [] : [before])];
      return `With all heads on: ${share(before, all)}. Without ${off}: ` +
        `${found.map((id) => share(id, next.p)).join(", ")}` +
        (now === before && change < CHANGE ? ". That hardly changes anything." : ".");
    },
    looks: (state) => {
      const {text, here, head} = state;
      const weights = [...state.seen()];
      const [most, second] = [...weights.keys()].sort((a, b) => weights[b] - weights[a]);
      const where = (i) => i === 0 ? "on the start of the text" : i === here ? "on itself"
        : `on “${text.show(text.ids[i])}”`;
      const isClose = weights[second] > 0.8 * weights[most];
      return `${SENTENCES.capital(state.nameOf(head))} has ${whole(weights[most])} of its weight ` +
        where(most) + (isClose ? ` and ${whole(weights[second])} ${where(second)}` : "") +
        (text.model.off.has(head) ? "; what it finds there is left out." : ".");
    },
    sampling: ({next}) => next.left === 1 ? "One token is left."
      : `${next.left} tokens are left; the likeliest has ${percent(next.p[next.likeliest])}.`,
    capital: (words) => words[0].toUpperCase() + words.slice(1),
  };

  const build = (figure, model) => {
    const stage = figure.querySelector(".tf-stage");
    const {storyteller: kind, text: start, root, head = "0"} = figure.dataset;
    const text = makeReader(model);
    const sound = makeReader(model.begin());    // the same text, read with all heads
    const {n_heads} = model.config;
    const state = {text, start, head: +head, here: 0, next: null,
      beginnings: JSON.parse(figure.dataset.beginnings || "[]"),
      settings: {temperature: 1, topK: 0, topP: 1, minP: 0},
      stop: () => {}, isSilent: () => false,
      seen: () => state.text.seen[state.here][state.head],
      nameOf: (i) => `head ${i % n_heads + 1} of layer ${Math.floor(i / n_heads) + 1}`,
      isFirst: () => text.given === text.ids.length && text.beginning() === start,
      likeliest: () => text.show(state.next.likeliest),
      // with the settings as they are, or nothing if no head is off
      withAllHeads: () => {
        if (!text.model.off.size) return null;
        sound.follow(text.ids);
        return tformerEngine.distribution(sound.logits[state.here], state.settings);
      },
      link: (p, words, linked, lesson) => {
        const at = lesson ? words.indexOf(linked) : -1;
        p.replaceChildren(at < 0 ? words : words.slice(0, at));
        if (at < 0) return;
        make(p, "a", {href: `${root}nbs/${lesson}.html`}, linked);
        p.append(words.slice(at + linked.length));
      },
      label: (parent, key) =>         // as the still has it
        parent.append(figure.querySelector(`[data-label=${key}]`).cloneNode(true))};
    text.read(start);
    state.here = text.ids.length - 1;
    let waiting = 0;
    const refresh = (afresh) => {
      drawn.forEach((draw) => draw(afresh));
      const sentence = SENTENCES[kind](state);
      if (state.sentence.textContent !== sentence) state.sentence.textContent = sentence;
      clearTimeout(waiting);
      if (ready && !state.isSilent()) waiting = setTimeout(state.speak, SILENCE);
    };
    state.speak = () => { spoken.textContent = state.sentence.textContent; };
    let ready = false;
    const drawn = STAGES[kind](stage, state, refresh);
    const spoken = make(stage, "p", {class: "tf-heard", "aria-live": "polite"});
    refresh(true);
    ready = true;
    new MutationObserver(() => refresh(true)).observe(document.documentElement,
      {attributes: true, attributeFilter: ["data-theme"]});
    figure.storyteller = state;
    const wasStarted = document.activeElement === figure.querySelector(".tf-start-model");
    stage.hidden = false;
    figure.classList.add("tf-awake");
    if (wasStarted) stage.querySelector("button, input").focus({preventScroll: true});
  };

  // ---- loading

  const figures = [...document.querySelectorAll("[data-storyteller]")];
  const starts = () => figures.map((figure) => figure.querySelector(".tf-start-model"));
  let asked = false;
  const ask = () => {
    if (asked) return;
    asked = true;
    const script = make(document.head, "script", {src: `${HERE}stories.js`});
    script.addEventListener("error", () => {
      asked = false;
      starts().forEach((start) => { start.textContent = "It did not load. Try again"; });
    });
  };
  // Called by stories.js: the configuration, and the weights in base64.
  const receive = (config, base64) => {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const model = tformerEngine.load(config, bytes);
    for (const figure of figures) build(figure, model.begin());
  };
  // Nobody is asked to pay for a megabyte, or to wait for it.
  const isSlow = ({saveData, effectiveType} = {}) =>
    Boolean(saveData) || /2g|3g/.test(effectiveType);
  const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 200));
  addEventListener("load", () => {
    const near = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      near.disconnect();
      if (!isSlow(navigator.connection)) whenIdle(ask);
    }, {rootMargin: "100% 0px"});
    for (const figure of figures) near.observe(figure);
    for (const start of starts()) {
      start.disabled = false;
      start.addEventListener("click", () => {
        start.textContent = "It is loading …";
        ask();
      });
    }
  });
  return {receive, makeReader, randomNumbers, percent};
})();
