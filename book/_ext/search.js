/* How the search of the book reads, ranks and excerpts; Sphinx puts this text
   into language_data.js, which the search page loads. */

// A chapter that has the word in its title comes before one that has it in the
// title of a section, then comes a name of the package that holds it, and then a
// page that only uses it.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 4,
  objPrio: { 0: 0, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 20,
  partialTitle: 14,
  term: 5,
  partialTerm: 2,
  score([, title, , , score]) {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const inTitle = splitQuery(query.toLowerCase())
      .some((word) => title.toLowerCase().includes(word));
    return inTitle ? score + 1 : score;
  },
};

// The root is a word; a letter beside it, or any other letter alone, is none:
// it would be found in every name.
var splitQuery = (query) => {
  const words = query.replace(/√/g, " sqrt ")
    .split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((word) => word);
  const long = words.filter((word) => word.length > 1);
  return long.length ? long : words;
};

// Excerpts come from the article, not from the buttons around it.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const plain = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const article = page.querySelector("article.bd-article");
    if (!article) return plain(html, anchor);
    article.querySelectorAll(".headerlink, script, style, svg, .tf-machine")
      .forEach((element) => element.remove());
    const target = anchor && article.querySelector(
      "#" + CSS.escape(anchor.replace(/^#/, "")));
    return (target || article).textContent.replace(/\s+/g, " ").trim();
  };
});
