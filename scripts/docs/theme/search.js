// Search in what scripts/docs/site_hooks.py wrote to search_pages.js. Works from a disk:
// nothing is fetched. `find_sections` has no page in it, so that it can be tested alone.
"use strict";

const LITTLE_WORDS = new Set(
  "a an and are at be can do does for from get how i in into is it my not of on or the to use what when why with".split(" "));

// "resuming", "resumed" and "resumes" are looked for as "resum".
const stem_of = (word) => (word.length > 5 ? word.replace(/(ing|ed|es|e|s)$/, "") : word);

const words_of = (text) => {
  const words = text.toLowerCase().split(/[^\p{L}\p{N}_:.+-]+/u).filter(Boolean);
  const telling = words.filter((word) => !LITTLE_WORDS.has(word));
  return (telling.length ? telling : words).map(stem_of);
};

// How much a word counts in a section: most where the page says that it is searched for.
const points_of = (section, word) => {
  const places = [[section.words, 16], [section.page, 8], [section.heading, 6], [section.text, 1]];
  let points = 0;
  for (const [text, weight] of places) {
    const at = text.toLowerCase().indexOf(word);
    if (at < 0) continue;
    const begins = at === 0 || !/[\p{L}\p{N}]/u.test(text[at - 1]);
    points += begins ? weight : weight / 3;
  }
  return points;
};

// The sections with most of the words, the best first, two of a page at most.
const find_sections = (sections, text, most = 12) => {
  const words = words_of(text);
  if (!words.length) return [];
  const phrase = text.trim().toLowerCase();
  const by_page = new Map();
  return sections.map((section) => {
    const points = words.map((word) => points_of(section, word));
    const num_found = points.filter(Boolean).length;
    const is_named = section.words.toLowerCase().split(", ").includes(phrase);
    return { section, is_named, num_found, points: points.reduce((a, b) => a + b, 0) };
  })
    .filter((hit) => hit.is_named || (hit.num_found > 0 && (hit.num_found === words.length || words.length > 2)))
    .sort((a, b) => b.is_named - a.is_named || b.num_found - a.num_found || b.points - a.points)
    .map((hit) => hit.section)
    .filter(({ page }) => by_page.set(page, (by_page.get(page) ?? 0) + 1).get(page) <= 2)
    .slice(0, most);
};
