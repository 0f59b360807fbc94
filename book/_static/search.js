/* The search: the sections of the book, ranked while one types, on the search page and
   in the dialogue of every page, for which site.js loads this when it opens.

   search-titles.js holds what a result says of itself, so that titles and terms are
   found at once; search-texts.js holds the texts, and is awaited. MiniSearch finds and
   ranks. Where the query is a term of the glossary, another name of it or the title of
   a lesson, the sections that explain it come first; a term that stands in a longer
   query lifts them. Nothing else is fetched. */
(() => {
  const SHOWN = 30;            // results at once
  const FIRST = 6;             // of them in the dialogue
  const AROUND = 240;          // letters of an excerpt
  const FEW = 4;               // below, sections with some of the words come as well
  const LIFT = 3;              // of a section that explains a term in the query
  const WHOLE = 4;             // times as much weight as one part of it has a_name
  const LONGEST = 4;           // words of a term
  const LOOKED_FOR = 6;        // words for which a page is searched
  const STOP = new Set(("a an and are as at be by can do does for from get has have how " +
    "i in is it its me my not of on or per should that the their there this to use " +
    "versus vs was we what when where which why will with you your").split(" "));
  const KIND = { lesson: 2, term: 1.6, package: 0.8, appendix: 1.1, page: 1, work: 0.5,
    name: 0.25, list: 0.3 };
  const CALLED = { term: "Glossary", name: "API", package: "The package",
    appendix: "Appendix", list: "Reference", page: "Reference", work: "Reference" };
  const WORD = /√|[\p{L}\p{N}]+(?:[._'’-][\p{L}\p{N}]+)*/gu;

  // A word and the parts that a hyphen, a dot or a low line joins; 10,000 is a number.
  const split = (text) => {
    const found = [];
    const plain = text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1");
    for (const [word] of plain.matchAll(WORD)) {
      found.push(word);
      if (!/[._'’-]/.test(word)) continue;
      found.push(...word.split(/[._'’-]/).filter((part) => part.length > 1));
    }
    return found;
  };
  // Short words are found as they are; longer ones without the ending, so that
  // quantize, quantized and quantization are one word.
  const cut = (word) => {
    if (word === "√") return "sqrt";
    if (word.length < 2 || STOP.has(word)) return null;
    if (word.length < 4 || /\d/.test(word)) return word;
    return word.replace(/(?<=.{3}i[sz])(?:ations?|ers?|ing|ed|es?)$/, "")
      .replace(/ies$/, "y").replace(/(?<=.{4}[st])ions?$/, "")
      .replace(/(?<=.{3})(?:ings?|ed|es|s)$/, "").replace(/(?<=.{3})e$/, "");
  };
  const stems = new Map();
  const stem = (word) => {
    let found = stems.get(word);
    if (found === undefined) stems.set(word, found = cut(word));
    return found;
  };
  // A name however it is written: pre-norm, prenorm, pre norm.
  const normal = (text) =>
    text.toLowerCase().replace(/[^_√\p{L}\p{N}]/gu, "").replace(/(?<=...)s$/, "");
  // A title without its number.
  const unnumbered = (title) =>
    title.replace(/^\d+[a-z]?(?:\.\d+)*\. /, "").replace(/^(?:The|A) /, "");

  const { pages, sections: rows, asked: others } = window.SEARCH_TITLES;
  const sections = rows.map(([page, anchor, title, kind, names, explained]) => ({
    url: `${pages[page][0]}#${anchor}`, page: pages[page][1], title, kind, names,
    explained, text: "", printed: "" }));
  const made = () => new MiniSearch({
    fields: ["page", "title", "names", "text", "printed"],
    storeFields: [],
    tokenize: split,
    processTerm: stem,
    extractField: (section, name) => name === "names" ?
      (section.names || []).join(" ; ") :
      name === "title" && section.names ? "" : section[name],
  });
  const numbered = () => sections.map((section, id) => ({ ...section, id }));
  let index = made();
  index.addAll(numbered());

  // What a term means, and where it is explained.
  const first = new Map();
  const pin = (name, ids) => first.set(name, [...(first.get(name) || []), ...ids]);
  Object.entries(others).forEach(([name, ids]) => pin(normal(name), ids));
  sections.forEach((section, id) => {
    if (section.kind === "lesson" && section.page === section.title)
      pin(normal(unnumbered(section.title)), [id]);
  });
  sections.forEach((section, id) => {
    if (section.kind === "term")
      section.names.forEach((name) => pin(normal(name), [...section.explained, id]));
  });
  sections.forEach((section, id) => {
    if (section.kind === "work") pin(normal(section.title), [id]);
    if (section.kind === "name") {
      const name = section.title.split(".").pop();
      if (/_|[a-z][A-Z]/.test(name)) pin(normal(name), [id]);
    }
  });

  // The sections that explain terms of some words, or with capitals, in a query.
  const named = (query) => {
    const words = query.split(/\s+/), found = new Set();
    for (let from = 0; from < words.length; from++)
      for (let to = from + 1; to <= Math.min(from + LONGEST, words.length); to++) {
        const name = words.slice(from, to).join(" ");
        if (to - from > 1 || /\p{Lu}|\d/u.test(name))
          (first.get(normal(name)) || []).forEach((id) => found.add(id));
      }
    return new Set([...found].filter((id) => sections[id].kind !== "term"));
  };
  // A word with low lines is found as it is, or by all of its parts.
  const every = (queries) => ({ combineWith: "AND", queries: queries.filter((query) =>
    typeof query !== "string" || stem(query)) });
  const wanted = (query) => every((query.replace(/(\d),(?=\d{3})/g, "$1").match(WORD) || []).map((word) => {
    const [whole, ...parts] = split(word);
    return parts.filter(stem).length < 2 ? whole :
      { combineWith: "OR", queries: [{ queries: [whole], boostTerm: () => WHOLE },
        every(parts)] };
  }));
  // The sections, the best one first, each with the words that were found in it; and
  // how many have all words.
  const search = (query) => {
    const lifted = named(query);
    const options = {
      boost: { page: 4, title: 3, names: 3, printed: 0.5 },
      boostDocument: (id) => KIND[sections[id].kind] * (lifted.has(id) ? LIFT : 1),
      prefix: (word) => word.length > 3,
    };
    const found = index.search(wanted(query), options);
    const name = normal(query);
    const pinned = first.get(name) || first.get(name.replace(/_/g, "")) || [];
    const whole = new Set([...pinned, ...found.map((hit) => hit.id)]).size;
    if (found.length < FEW)
      found.push(...index.search(query, { ...options, combineWith: "OR",
        fuzzy: (word) => !found.length && word.length > 4 ? 0.2 : false }));
    const words = new Map(found.map((hit) => [hit.id, hit.terms]));
    const plain = split(query).map(stem).filter((word) => word);
    const ids = [...pinned, ...found.map((hit) => hit.id)];
    return { whole, hits: [...new Set(ids)].map((id) =>
      [sections[id], words.get(id) || plain]) };
  };

  // Pieces of a text; every second one is a word that was asked for.
  const marked = (text, words) => {
    const asked = new Set(words), pieces = [];
    let last = 0;
    for (const match of text.matchAll(WORD)) {
      if (!split(match[0]).some((part) => asked.has(stem(part)))) continue;
      pieces.push(text.slice(last, match.index), match[0]);
      last = match.index + match[0].length;
    }
    return [...pieces, text.slice(last)];
  };
  // The stretch of a text in which most of the words stand.
  const excerpt = (section, words) => {
    const best = { count: -1, text: "" };
    for (const text of [section.text, section.printed]) {
      const places = [];
      let at = 0;
      marked(text, words).forEach((piece, i) => {
        if (i % 2) places.push([at, stem(split(piece)[0])]);
        at += piece.length;
      });
      for (const [start] of places.length ? places : [[0]]) {
        const near = places.filter(([p]) => p >= start && p < start + AROUND - 60);
        const count = new Set(near.map(([, word]) => word)).size;
        if (count > best.count) Object.assign(best, { count, text, start });
      }
    }
    let from = Math.max(0, best.start - 60);
    if (from) from = best.text.indexOf(" ", from) + 1;
    const end = best.text.length <= from + AROUND ? best.text.length :
      best.text.lastIndexOf(" ", from + AROUND);
    return (from ? "… " : "") + best.text.slice(from, end) +
      (end < best.text.length ? " …" : "");
  };
  // In how many sections a word stands.
  const counts = new Map();
  const common = (word) => {
    const known = stem(word);
    if (!counts.has(known))
      counts.set(known, known ? index.search(word, { prefix: false }).length : Infinity);
    return counts.get(known);
  };

  const element = (tag, name, ...children) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    node.append(...children);
    return node;
  };
  const withMarks = (text, words) => marked(text, words)
    .map((piece, i) => i % 2 ? element("mark", "", piece) : piece);
  // Where a result leads: the page looks for the words, the rarest first, or for the
  // whole phrase. site.js does that.
  const root = new URL("..", document.currentScript.src);
  const address = (section, words, query) => {
    const [page, anchor] = section.url.split("#");
    const plain = marked(`${section.text} ${section.printed}`, words)
      .filter((piece, i) => i % 2).map((word) => word.toLowerCase());
    const rare = [...new Set(plain)].sort((a, b) => common(a) - common(b));
    const find = new URLSearchParams();
    if (rare.length) find.set("find", rare.slice(0, LOOKED_FOR).join(" "));
    if (rare.length && /\S\s+\S/.test(query)) find.set("phrase", query);
    return `${new URL(page, root)}${rare.length ? `?${find}` : ""}#${anchor}`;
  };
  const result = (query) => ([section, words]) => {
    const link = element("a", "", ...withMarks(section.title, words));
    link.href = address(section, words, query);
    const page = CALLED[section.kind] || "Lesson";
    const alone = section.kind === "term" || section.page === section.title;
    const where = alone ? page : `${page}: ${section.page}`;
    return element("li", `tf-is-${section.kind}`, link,
      element("span", "tf-where", where),
      element("p", "", ...withMarks(excerpt(section, words), words)));
  };
  const said = (query, { whole, hits }, shown) => {
    if (!query) return "";
    if (document.documentElement.dataset.search !== "complete")
      return "Reading the book …";
    if (!hits.length) return `No section has “${query}”.`;
    const several = hits.length === 1 ? "1 section" : `${hits.length} sections`;
    const part = hits.length > shown ? `, the first ${shown} of them` : "";
    if (whole === hits.length) return `${several}${part}:`;
    if (split(query).filter(stem).length < 2)
      return `No section has “${query}”; similar words: ${several}${part}.`;
    return (whole ? `${whole} with all of these words; then those with some` :
      "No section has all of these words; these have some") + `: ${several}${part}.`;
  };

  // A field, a line that says how many there are, and a list.
  const connect = (input, summary, list, more, most) => {
    let shown = most;
    const show = () => {
      const query = input.value.trim();
      const found = query ? search(query) : { whole: 0, hits: [] };
      list.replaceChildren(...found.hits.slice(0, shown).map(result(query)));
      summary.textContent = said(query, found, shown);
      more(query, found.hits.length - shown, () => {
        const at = list.children.length;
        shown += SHOWN;
        show();
        list.children[at].querySelector("a").focus();
      });
    };
    let waiting = 0;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        shown = most;
        show();
      }, 80);
    });
    addEventListener("search-complete", show);
    return show;
  };

  const box = document.querySelector(".bd-search-container");
  if (box) {
    const input = box.querySelector("input[type=search]");
    const button = element("button", "btn tf-more-results", "");
    button.type = "button";
    const list = box.querySelector(".tf-results");
    list.after(button);
    const show = connect(input, box.querySelector(".search-summary"), list,
      (query, left, further) => {
        button.hidden = left <= 0;
        button.textContent = `Show ${Math.min(left, SHOWN)} more`;
        button.onclick = further;
      }, SHOWN);
    input.addEventListener("input", () => {
      const asked = input.value ? `?q=${encodeURIComponent(input.value)}` : "";
      history.replaceState(null, "", location.pathname + asked);
    });
    box.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      show();
    });
    input.value = new URLSearchParams(location.search).get("q") || "";
    input.focus();
    show();
  }

  const dialog = document.getElementById("pst-search-dialog");
  if (dialog && !box) {
    const form = dialog.querySelector("form");
    const input = form.querySelector("input");
    const summary = element("p", "search-summary");
    summary.setAttribute("role", "status");
    const list = element("ol", "tf-results");
    const all = element("a", "tf-all-results", "");
    const found = element("div", "tf-found-here", summary, list, all);
    dialog.append(found);
    const show = connect(input, summary, list, (query, left) => {
      found.hidden = !query;
      all.hidden = left <= 0;
      all.textContent = `All ${left + FIRST} results`;
      all.href = `${form.action}?q=${encodeURIComponent(query)}`;
    }, FIRST);
    // with the arrows from the field to the results, and back
    dialog.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const stops = [input, ...found.querySelectorAll("a:not([hidden])")];
      const at = stops.indexOf(document.activeElement) + step;
      if (!stops[at]) return;
      event.preventDefault();
      stops[at].focus();
    });
    // a result on this very page opens no other
    list.addEventListener("click", (event) => {
      if (event.target.closest("a")) dialog.close();
    });
    show();
  }

  // The texts come packed, and are read in pieces, so that the page answers meanwhile.
  const read = async () => {
    const bytes = Uint8Array.from(atob(window.SEARCH_TEXTS), (c) => c.charCodeAt(0));
    window.SEARCH_TEXTS = "";
    const packed = new Blob([bytes]).stream();
    const texts = await new Response(packed.pipeThrough(new DecompressionStream("gzip")))
      .json();
    texts.forEach(([text, printed], id) => Object.assign(sections[id], { text, printed }));
    const complete = made();
    await complete.addAllAsync(numbered(), { chunkSize: 100 });
    index = complete;
    counts.clear();
    document.documentElement.dataset.search = "complete";
    dispatchEvent(new Event("search-complete"));
  };
  document.documentElement.dataset.search = "titles";
  if (window.SEARCH_TEXTS) read();
  else addEventListener("search-texts", read, { once: true });
})();
