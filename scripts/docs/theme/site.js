// The search field, menus that are open where there is room, buttons that copy code, and
// tables and code that the keyboard can scroll.
"use strict";
(() => {
  const wide_at = { menu: "(min-width: 60rem)", toc: "(min-width: 78rem)" };
  for (const [id, query] of Object.entries(wide_at)) {
    const list = document.getElementById(id);
    const wide = window.matchMedia(query);
    const adapt = () => { if (list) list.open = wide.matches; };
    wide.addEventListener("change", adapt);
    adapt();
  }

  // ---- Search

  const field = document.getElementById("search");
  const found = document.getElementById("found");
  const said = document.getElementById("search-said");

  const item_of = (section) => {
    const link = document.createElement("a");
    link.href = document.body.dataset.root + "/" + section.url;
    link.textContent = section.heading || section.page;
    const where = document.createElement("span");
    where.className = "where";
    where.textContent = section.heading ? " in " + section.page : "";
    link.append(where);
    const item = document.createElement("li");
    item.append(link);
    return item;
  };

  const show = (text) => {
    const sections = find_sections(SEARCH_PAGES, text);
    found.replaceChildren(...sections.map(item_of));
    found.hidden = !sections.length;
    said.textContent = !text.trim() ? "" : sections.length ? `${sections.length} places` : "Nothing found.";
  };

  field.addEventListener("input", () => show(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { field.value = ""; show(""); }
    if (event.key === "Enter") found.querySelector("a")?.click();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, textarea")) return;
    event.preventDefault();
    field.focus();
  });

  // ---- Code

  // Of a block with prompts, the commands alone.
  const code_to_copy = (text) => {
    const lines = text.replace(/\n$/, "").split("\n");
    if (!lines.some((line) => line.startsWith("$ "))) return lines.join("\n");
    const commands = [];
    let goes_on = false;
    for (const line of lines) {
      if (goes_on || line.startsWith("$ ")) commands.push(goes_on ? line : line.slice(2));
      goes_on = (goes_on || line.startsWith("$ ")) && line.endsWith("\\");
    }
    return commands.join("\n");
  };

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // A page from a disk may not use the clipboard itself.
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };

  for (const block of document.querySelectorAll("main pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await copy(code_to_copy(block.textContent));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    const frame = document.createElement("div");
    frame.className = "code";
    block.replaceWith(frame);
    frame.append(block, button);
  }

  // ---- What is wider than the page

  const scrolled = [...document.querySelectorAll("main pre, main .table")];
  const reach = () => {
    scrolled.forEach((node, number) => {
      if (node.scrollWidth > node.clientWidth) {
        node.tabIndex = 0;
        node.setAttribute("role", "region");
        node.setAttribute("aria-label", `${node.matches(".table") ? "Table" : "Code"} ${number + 1}, scrolls sideways`);
      } else {
        ["tabindex", "role", "aria-label"].forEach((name) => node.removeAttribute(name));
      }
    });
  };
  new ResizeObserver(reach).observe(document.querySelector("main"));

  // ---- Where one is on the page

  const links = new Map([...document.querySelectorAll("#toc a")].map((link) => [link.hash.slice(1), link]));
  const headings = [...document.querySelectorAll("main h2[id], main h3[id]")];
  const mark = () => {
    const above = headings.filter((heading) => heading.getBoundingClientRect().top < 120);
    const current = links.get((above.at(-1) || headings[0])?.id);
    for (const link of links.values()) link.toggleAttribute("data-current", link === current);
  };
  if (links.size) {
    document.addEventListener("scroll", mark, { passive: true });
    mark();
  }
})();
