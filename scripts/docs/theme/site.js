// Search in what scripts/docs/site_hooks.py wrote to search_pages.js, and a menu
// that is open where there is room. Works from a disk: nothing is fetched.
"use strict";
(() => {
  const menu = document.getElementById("menu");
  const wide = window.matchMedia("(min-width: 60rem)");
  const adapt = () => { menu.open = wide.matches; };
  wide.addEventListener("change", adapt);
  adapt();

  const root = document.body.dataset.root;
  const found = document.getElementById("found");
  const words_of = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);

  // Every word must occur; titles count more than headings, those more than text.
  const score = (section, words) => {
    let sum = 0;
    for (const word of words) {
      const places = [section.page, section.heading, section.text];
      const place = places.findIndex((text) => text.toLowerCase().includes(word));
      if (place < 0) return 0;
      sum += 9 >> (2 * place) || 1;
    }
    return sum;
  };

  const show = (text) => {
    found.replaceChildren();
    const words = words_of(text);
    if (!words.length) return;
    const hits = SEARCH_PAGES.map((section) => ({ section, points: score(section, words) }))
      .filter((hit) => hit.points > 0)
      .sort((a, b) => b.points - a.points)
      .slice(0, 12);
    for (const { section } of hits) {
      const link = document.createElement("a");
      link.href = root + "/" + section.url;
      link.textContent = section.heading || section.page;
      const where = document.createElement("span");
      where.className = "where";
      where.textContent = section.heading ? " in " + section.page : "";
      link.append(where);
      const item = document.createElement("li");
      item.append(link);
      found.append(item);
    }
    if (!hits.length) found.textContent = "Nothing found.";
  };

  document.getElementById("search").addEventListener("input", (event) => show(event.target.value));
})();
