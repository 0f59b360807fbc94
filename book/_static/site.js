/* What style sheets alone cannot mend, on every page. */
(() => {
  // Paper is light: rules of the theme that ask for the dark mode rest
  // while a page is printed.
  const root = document.documentElement, paper = matchMedia("print");
  let before = null;
  let closed = [];        // folds that are open on paper only
  const print = (on) => {
    if (on && before === null) {
      before = root.dataset.theme || "light";
      root.dataset.theme = "light";
      closed = [...document.querySelectorAll(".bd-article details.tf-fold, " +
        ".bd-article .tag_setup details")].filter((fold) => !fold.open);
      closed.forEach((fold) => { fold.open = true; });
    } else if (!on && before !== null) {
      root.dataset.theme = before;
      before = null;
      closed.forEach((fold) => { fold.open = false; });
    }
  };
  paper.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  // On paper the setup begins behind its imports: their lines are marked, and so are
  // blank lines that would stand first, or one below another.
  const imports = (pre) => {
    let within = false, blank = true;
    const lines = pre.innerHTML.split("\n").map((line) => {
      const words = line.replace(/<[^>]*>/g, "");
      const gone = within || /^(import|from) /.test(words) || (blank && !words.trim());
      within = gone && (within || words.endsWith("(")) && !words.startsWith(")");
      if (gone) return `<span class="tf-import">${line}\n</span>`;
      blank = !words.trim();
      return `${line}\n`;
    });
    pre.innerHTML = lines.join("").replace(/\n(<\/span>)?$/, "$1");
    if (!lines.some((line) => !line.startsWith('<span class="tf-import">')))
      pre.closest(".cell").classList.add("tf-imports-only");
  };

  // A button that unfolds is named after what it unfolds.
  const name = () => {
    document.querySelectorAll("button.toggle-button").forEach((button) => {
      const title = button.closest(".admonition-title");
      const words = title ? title.textContent.trim() : "";
      button.setAttribute("aria-label",
        `${button.dataset.toggleHint || "Show"}: ${words}`);
    });
    document.querySelectorAll("i[class*='fa-'], span[class*='fa-']")
      .forEach((icon) => icon.setAttribute("aria-hidden", "true"));
  };

  // An inline formula wider than its column, and no other, scrolls.
  const widths = () => {
    document.querySelectorAll("mjx-container:not([display])")
      .forEach((formula) => {
        formula.classList.remove("tf-wide");
        const block = formula.closest("p, li, dd, td, th, h1, h2, h3, h4, " +
                                      "blockquote, figcaption, div");
        if (block && formula.offsetWidth > block.clientWidth)
          formula.classList.add("tf-wide");
      });
  };
  // What is wider than its box can be scrolled with the keys, and says what it is.
  const WIDE = [["formula", "mjx-container"], ["code", ".bd-article pre"], ["drawing", ".tf-panel"],
    ["table", ".pst-scrollable-table-container"],
    ["part", ".output.text_html, .bd-article [style*='overflow-x']"]];
  let regions = 0;
  const reach = (box) => {
    const scrolls = box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 0 &&
      /auto|scroll/.test(getComputedStyle(box).overflowX);
    if (scrolls) box.tabIndex = 0;
    else ["role", "aria-label", "tabindex"].forEach((name) => box.removeAttribute(name));
    if (!scrolls || box.matches("pre, [role=region]")) return;
    const table = box.querySelector("table");
    const kind = table && !box.closest("mjx-container") ? "table" :
      WIDE.find(([, where]) => box.matches(where))[0];
    const words = kind === "table" ? [...table.querySelectorAll("thead th")]
      .map((head) => head.textContent.trim()).join(", ") :
      box.querySelector("svg > title")?.textContent || "";
    box.setAttribute("role", "region");
    box.setAttribute("aria-label",
      `wide ${kind} ${++regions}${words && ": "}${words}`);
  };
  const seen = new ResizeObserver((changes) =>
    changes.forEach((change) => reach(change.target)));
  const watch = (boxes) =>
    document.querySelectorAll(boxes).forEach((box) => seen.observe(box));

  // One click shows all that comes out between a question and its answer.
  const together = () => {
    const boxes = [...document.querySelectorAll(
      "details.tf-reveal, details.tf-answer, .tf-predict")];
    boxes.forEach((box, i) => {
      const next = boxes[i + 1];
      if (box.matches(".tf-reveal") && next && next.matches(".tf-reveal"))
        box.addEventListener("toggle", () => { next.open = box.open; });
    });
  };
  // Options of a prediction become buttons; choosing one says whether it is
  // right and opens the fold below. Without this script they are a list, and
  // the fold is opened by hand.
  let questions = 0;
  const hint = (button, words) => {     // for those who listen
    const span = document.createElement("span");
    span.className = "tf-heard";
    span.textContent = words;
    button.append(span);
  };
  const ask = (box) => {
    const list = box.querySelector("ul.tf-options");
    const reveal = box.querySelector("details.tf-reveal");
    const right = +list.className.match(/tf-right-(\d+)/)[1] - 1;
    const verdict = document.createElement("p");
    verdict.className = "tf-verdict";
    verdict.setAttribute("role", "status");
    list.after(verdict);
    const group = document.createElement("div");    // named by the question
    group.setAttribute("role", "group");
    const asked = list.previousElementSibling;
    if (asked) {
      asked.id ||= `tf-question-${++questions}`;
      group.setAttribute("aria-labelledby", asked.id);
    }
    list.before(group);
    group.append(list);
    const buttons = [...list.children].map((item, i) => {
      const button = document.createElement("button");
      button.type = "button";
      const words = item.querySelector("p") || item;
      button.append(...words.childNodes);
      item.replaceChildren(button);
      button.addEventListener("click", () => choose(i));
      return button;
    });
    const choose = (i) => {
      if (buttons[i].getAttribute("aria-disabled")) return;
      buttons.forEach((button) => button.setAttribute("aria-disabled", "true"));
      buttons[i].setAttribute("aria-pressed", "true");
      const answer = buttons[right].textContent.trim();
      buttons[right].classList.add("tf-right");
      if (i !== right) {
        buttons[i].classList.add("tf-wrong");
        hint(buttons[i], " (your answer, which is wrong)");
      }
      hint(buttons[right], " (the right answer)");
      verdict.textContent = i === right ? "Right." : `No. The answer is: ${answer}`;
      reveal.open = true;
    };
    list.classList.add("tf-ready");
  };
  // "Skip to main content" leads behind the toolbar, to the text itself.
  const skip = () => {
    const link = document.querySelector("#pst-skip-link a, a#pst-skip-link");
    const article = document.querySelector("article.bd-article");
    if (!link || !article) return;
    article.id ||= "tf-article";
    article.tabIndex = -1;
    link.setAttribute("href", `#${article.id}`);
  };
  // What the dialogue of the search needs is loaded when it opens.
  const own = document.currentScript.src;
  const searching = () => {
    const dialog = document.getElementById("pst-search-dialog");
    if (!dialog) return;
    const load = () => {
      if (document.querySelector("script[src*='_static/search.js']")) return;
      for (const name of ["minisearch/minisearch", "search-titles", "search",
                          "search-texts"]) {
        const script = document.createElement("script");
        script.src = new URL(`${name}.js`, own);
        script.async = false;       // one after the other
        document.head.append(script);
      }
    };
    dialog.addEventListener("focusin", load, { once: true });
  };
  // A result of the search says what was looked for (?find=words, the rarest first,
  // and ?phrase=). In the section that the address names, the first place with the
  // phrase, or with most of the words, is marked, and its folds are opened. It comes
  // into view, and so does the heading of its section if both find room.
  const find = () => {
    const query = new URLSearchParams(location.search);
    const asked = query.get("find");
    const phrase = (query.get("phrase") || "").toLowerCase();
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!asked || !target) return;
    history.replaceState(null, "", location.pathname + location.hash);
    const words = asked.toLowerCase().split(" ");
    const term = target.matches("dt") ? target.parentElement : null;
    const section = term || target.closest("section") || target;
    const walker = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
    let best = null, most = 0;
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (term && !(target.compareDocumentPosition(node) & 4)) continue;
      if (node.parentElement.closest("svg, script, style, button, h1, h2, h3, h4, " +
          ".cell_input, .tf-machine, select")) continue;
      const text = node.parentElement.closest("p, li, td, pre, div")
        .textContent.toLowerCase();
      const here = node.data.toLowerCase();
      const count = phrase && here.includes(phrase) ? Infinity :
        words.filter((word) => text.includes(word)).length;
      if (count > most && words.some((word) => here.includes(word)))
        [best, most] = [node, count];
    }
    if (!best) return;
    for (let box = best.parentElement; box; box = box.parentElement) {
      if (box.matches("details")) box.open = true;
      if (box.matches(".toggle-hidden")) box.querySelector("button")?.click();
    }
    const here = best.data.toLowerCase();
    const word = most === Infinity ? phrase : words.find((one) => here.includes(one));
    const range = document.createRange();
    range.setStart(best, here.indexOf(word));
    range.setEnd(best, here.indexOf(word) + word.length);
    const mark = document.createElement("mark");
    mark.className = "tf-found";
    range.surroundContents(mark);
    const above = target.closest("section")?.querySelector("h1, h2, h3, h4") || target;
    const room = mark.getBoundingClientRect().bottom - above.getBoundingClientRect().top;
    if (room > 0 && room < 0.6 * innerHeight) above.scrollIntoView({ block: "start" });
    else mark.scrollIntoView({ block: "center" });
  };
  // An address that names a fold, or something in one, opens it.
  const unfold = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folds = [];
    for (let box = target; box; box = box.parentElement)
      if (box.matches("details") && !box.open) folds.push(box);
    folds.forEach((fold) => { fold.open = true; });
    if (folds.length) target.scrollIntoView();
  };
  // The theme keeps the place of the sidebar from page to page. If the current page
  // is out of view there, it comes into the middle.
  const current = () => {
    const bar = document.querySelector(".bd-sidebar-primary");
    const item = bar && bar.querySelector(".bd-links li.current > a");
    if (!item) return;
    const box = item.getBoundingClientRect(), frame = bar.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > Math.min(frame.bottom, innerHeight))
      bar.scrollTop += box.top - frame.top - bar.clientHeight / 2;
  };
  // Lessons that were read are ticked, on the pages of the routes and at the foot of
  // each lesson. Only this browser keeps the ticks.
  const READ = "tformer-read";
  const ticked = () => {
    try {
      return new Set(JSON.parse(localStorage.getItem(READ)) || []);
    } catch {
      return new Set();     // the browser keeps nothing, or something else
    }
  };
  // The way that a reader has taken: the route whose page was opened last. Its lessons
  // say at their head and foot what comes next on it.
  const WAY = "tformer-way";
  const way = () => {
    let taken = null;
    try {
      const opened = document.querySelector(".tf-route[data-way]");
      if (opened) localStorage.setItem(WAY, opened.dataset.way);
      taken = localStorage.getItem(WAY);
    } catch {
      return;               // the browser keeps nothing
    }
    document.querySelectorAll("nav.tf-way").forEach((line) => {
      line.hidden = line.dataset.way !== taken;
      line.querySelector("button").addEventListener("click", () => {
        localStorage.removeItem(WAY);
        document.querySelectorAll("nav.tf-way").forEach((one) => { one.hidden = true; });
      });
    });
  };
  const LESSON = /nbs\/[0-9A][^/]*(?=\.html$)/;
  const lesson = (link) => decodeURIComponent(new URL(link.href).pathname).match(LESSON);
  // In the sidebar lessons that were read have a tick, and a route begins with the
  // first lesson that was not.
  const tickLinks = (read) => {
    document.querySelectorAll(".bd-links a[href]").forEach((link) => {
      const page = lesson(link);
      link.classList.toggle("tf-was-read", Boolean(page && read.has(page[0])));
    });
    const begin = document.querySelector("a[data-begin]");
    if (!begin) return;
    const left = [...document.querySelectorAll(".tf-route li a")]
      .filter((link) => !read.has(link.closest("li").querySelector("input").dataset.page));
    const all = document.querySelectorAll(".tf-route li").length;
    begin.hidden = !left.length;
    if (!left.length) return;
    begin.href = left[0].href;
    begin.textContent =
      `${left.length < all ? "Go on" : "Begin"}: ${left[0].textContent}`;
  };
  const ticks = () => {
    const path = lesson(location);
    const article = document.querySelector("article.bd-article");
    if (path && article) {
      const label = document.createElement("label");
      label.className = "tf-done";
      const box = document.createElement("input");
      box.type = "checkbox";
      box.dataset.page = path[0];
      label.append(box, "I have read this lesson");
      article.append(label);
    }
    const boxes = [...document.querySelectorAll("input[data-page]")];
    const show = () => {
      const read = ticked();
      boxes.forEach((box) => { box.checked = read.has(box.dataset.page); });
      tickLinks(read);
      document.querySelectorAll(".tf-progress").forEach((line) => {
        const pages = line.dataset.pages.split(" ");
        const n = pages.filter((page) => read.has(page)).length;
        line.textContent = n ? `${n} of ${pages.length} read` : "";
      });
    };
    boxes.forEach((box) => {
      box.hidden = false;
      box.addEventListener("change", () => {
        const read = ticked();
        if (box.checked) read.add(box.dataset.page);
        else read.delete(box.dataset.page);
        try {
          localStorage.setItem(READ, JSON.stringify([...read]));
        } catch {
          return;           // private windows may refuse; the tick holds until one leaves
        }
        show();
      });
    });
    show();
    addEventListener("storage", show);      // another window has ticked
  };
  addEventListener("load", () => {
    ticks();
    way();
    name();
    skip();
    searching();
    together();
    document.querySelectorAll(".tag_setup .cell_input pre").forEach(imports);
    current();
    document.querySelectorAll(".tf-ask").forEach(ask);
    find();
    unfold();
    addEventListener("hashchange", unfold);
    watch(WIDE.slice(1).map(([, where]) => where).join(", "));
    if (window.MathJax && MathJax.startup && MathJax.startup.promise) {
      MathJax.startup.promise.then(() => {
        widths();
        watch(WIDE[0][1]);
      });
      let waiting = 0;
      addEventListener("resize", () => {
        clearTimeout(waiting);
        waiting = setTimeout(widths, 150);
      });
    }
  });
})();
