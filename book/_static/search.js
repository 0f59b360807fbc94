/* The search page: the sections of the book, ranked while one types.

   search-sections.js holds what is searched, and MiniSearch finds and ranks it. Where
   the query is a term of the glossary or another name of it, the sections that
   explain it come first; a term that stands in a longer query lifts them. Nothing is
   fetched. */
(() => {
  const SHOWN = 30;            // results at once
  const AROUND = 240;          // letters of an excerpt
  const FEW = 4;               // below, sections with some of the words come as well
  const LIFT = 3;              // of a section that explains a term in the query
  const WHOLE = 4;             // times as much weight as one part of it has a_name
  const LONGEST = 4;           // words of a term
  const STOP = new Set(("a an and are as at be by can do does for from get has have how " +
    "i in is it me my not of on or should that the this to use versus vs was we what " +
    "when where which why will with you your").split(" "));
  const KIND = { lesson: 2, term: 1.6, package: 1.2, appendix: 1.1, page: 1, work: 0.5,
    name: 0.25, list: 0.4 };
  const CALLED = { term: "Glossary", name: "The package", package: "The package",
    appendix: "Appendix", list: "Reference", page: "Reference", work: "Reference" };
  const WORD = /√|[\p{L}\p{N}]+(?:[._'’-][\p{L}\p{N}]+)*/gu;

  // A word and the parts that a hyphen, a dot or a low line joins; 10,000 is a number.
  const split = (text) => {
    const found = [];
    const plain = text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1");
    for (const [word] of plain.matchAll(WORD)) {
      found.push(word);
      const parts = word.split(/[._'’-]/);
      if (parts.length > 1) found.push(...parts.filter((part) => part.length > 1));
    }
    return found;
  };
  // Short words are found as they are; longer ones without the ending.
  const stem = (word) => {
    if (word === "√") return "sqrt";
    if (word.length < 2 || STOP.has(word)) return null;
    if (word.length < 4 || /\d/.test(word)) return word;
    return word.replace(/ies$/, "y").replace(/(?<=.{3})(?:ings?|ed|es|s)$/, "")
      .replace(/(?<=.{3})e$/, "");
  };
  // A name however it is written: pre-norm, prenorm, pre norm.
  const normal = (text) =>
    text.toLowerCase().replace(/[^_√\p{L}\p{N}]/gu, "").replace(/(?<=...)s$/, "");

  const sections = window.SEARCH_SECTIONS;
  const index = new MiniSearch({
    fields: ["page", "title", "names", "text", "printed"],
    storeFields: [],
    tokenize: split,
    processTerm: stem,
    extractField: (section, name) => name === "names" ?
      (section.names || []).join(" ; ") :
      name === "title" && section.names ? "" : section[name],
  });
  // In pieces, so that the page answers in the meantime.
  const reading = index.addAllAsync(
    sections.map((section, id) => ({ ...section, id })), { chunkSize: 100 });

  // What a term means, and where it is explained.
  const byAddress = new Map(sections.map((section, id) => [section.url, id]));
  const first = new Map();
  const pin = (name, ids) => first.set(name, [...(first.get(name) || []), ...ids]);
  sections.forEach((section, id) => {
    if (section.kind === "term") {
      const explained = section.explained.map((url) => byAddress.get(url));
      const ids = [...explained.filter((i) => i !== undefined), id];
      section.names.forEach((name) => pin(normal(name), ids));
    }
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
  const asked = (query) => every((query.replace(/(\d),(?=\d{3})/g, "$1").match(WORD) || []).map((word) => {
    const [whole, ...parts] = split(word);
    return parts.filter(stem).length < 2 ? whole :
      { combineWith: "OR", queries: [{ queries: [whole], boostTerm: () => WHOLE },
        every(parts)] };
  }));
  const search = (query) => {
    const lifted = named(query);
    const options = {
      boost: { page: 4, title: 3, names: 3, printed: 0.5 },
      boostDocument: (id) => KIND[sections[id].kind] * (lifted.has(id) ? LIFT : 1),
      prefix: (word) => word.length > 3,
    };
    const found = index.search(asked(query), options);
    if (found.length < FEW)
      found.push(...index.search(query, { ...options, combineWith: "OR",
        fuzzy: (word) => !found.length && word.length > 4 ? 0.2 : false }));
    const words = new Map(found.map((hit) => [hit.id, hit.terms]));
    const plain = split(query).map(stem).filter((word) => word);
    const name = normal(query);
    const pinned = first.get(name) || first.get(name.replace(/_/g, "")) || [];
    const ids = [...pinned, ...found.map((hit) => hit.id)];
    return [...new Set(ids)].map((id) => [sections[id], words.get(id) || plain]);
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

  const element = (tag, name, ...children) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  };
  const withMarks = (text, words) => marked(text, words)
    .map((piece, i) => i % 2 ? element("mark", "", piece) : piece);
  const address = (section, words) => {
    const [page, anchor] = section.url.split("#");
    const plain = marked(`${section.text} ${section.printed}`, words)
      .filter((piece, i) => i % 2);
    const wanted = [...new Set(plain)].slice(0, 4).join(" ");
    return `${page}${wanted ? `?find=${encodeURIComponent(wanted)}` : ""}#${anchor}`;
  };
  const result = ([section, words]) => {
    const link = element("a", "", ...withMarks(section.title, words));
    link.href = address(section, words);
    const page = CALLED[section.kind] || "Lesson";
    const alone = section.kind === "term" || section.page === section.title;
    const where = alone ? page : `${page}: ${section.page}`;
    return element("li", `tf-is-${section.kind}`, link,
      element("span", "tf-where", where),
      element("p", "", ...withMarks(excerpt(section, words), words)));
  };

  const box = document.querySelector(".bd-search-container");
  const input = box.querySelector("input[type=search]");
  const summary = box.querySelector(".search-summary");
  const list = box.querySelector(".tf-results");
  let ready = false;
  const show = () => {
    const query = input.value.trim();
    if (!ready) {
      summary.textContent = query ? "Reading the book …" : "";
      return;
    }
    const found = query ? search(query) : [];
    list.replaceChildren(...found.slice(0, SHOWN).map(result));
    const counted = found.length === 1 ? "1 section" : `${found.length} sections`;
    summary.textContent = !query ? "" : !found.length ?
      `No section has “${query}”.` : found.length > SHOWN ?
      `${counted}, the first ${SHOWN} of them:` : `${counted}:`;
  };
  let waiting = 0;
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      show();
      const asked = input.value ? `?q=${encodeURIComponent(input.value)}` : "";
      history.replaceState(null, "", location.pathname + asked);
    }, 80);
  });
  box.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
  input.value = new URLSearchParams(location.search).get("q") || "";
  input.focus();
  show();
  reading.then(() => {
    ready = true;
    show();
  });
})();
