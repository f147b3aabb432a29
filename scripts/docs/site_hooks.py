"""What mkdocs calls while it builds the site: gathers the text for the search."""
import html
import json
import pathlib
import re

HEADING = re.compile(r'<h[23] id="([^"]+)">(.*?)</h[23]>', re.S)
LINK_TO_SELF = re.compile(r'<a class="headerlink".*?</a>', re.S)
TAG = re.compile(r"<[^>]+>")

sections = []


def text_of(markup):
    return " ".join(html.unescape(TAG.sub(" ", markup)).split())


def on_pre_build(config):
    sections.clear()


def on_page_content(content, page, config, files):
    """A page is one entry up to its first heading, and one for each heading."""
    plain = LINK_TO_SELF.sub("", content)
    parts = HEADING.split(plain)  # text, then id, heading, text, ...
    sections.append({"page": page.title, "heading": "", "url": page.url, "text": text_of(parts[0])})
    for anchor, heading, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        sections.append({
            "page": page.title,
            "heading": text_of(heading),
            "url": f"{page.url}#{anchor}",
            "text": text_of(text),
        })
    return content


def on_post_build(config):
    target = pathlib.Path(config["site_dir"]) / "search_pages.js"
    target.write_text("const SEARCH_PAGES = " + json.dumps(sections, indent=0) + ";\n")
