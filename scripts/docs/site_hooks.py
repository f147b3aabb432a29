"""What mkdocs calls while it builds the site: frames tables, gathers the text for the search.

A page says below a heading what its readers would search for, where the text has other
words: <!-- search: out of memory, OOM -->
"""
import html
import json
import pathlib
import re

HEADING = re.compile(r'<h[23] id="([^"]+)">(.*?)</h[23]>', re.S)
LINK_TO_SELF = re.compile(r'<a class="headerlink".*?</a>', re.S)
SEARCH_WORDS = re.compile(r"<!--\s*search:\s*(.*?)\s*-->", re.S)
TAG = re.compile(r"<!--.*?-->|<[^>]+>", re.S)
TABLE = re.compile(r"<table>.*?</table>", re.S)
EMPTY_HEADS = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*></th>\s*)+</tr>\s*</thead>\s*")
EMPTY_HEAD = re.compile(r"<th[^>]*></th>")
HEAD_CELL = re.compile(r"<th(?=[ >])")
FIRST_CELL = re.compile(r"(<tr>\s*)<td(?=[ >])(.*?)</td>", re.S)
ALIGNED = re.compile(r' style="text-align: (left|right|center);"')
CODE = re.compile(r"(<code>)(.*?)(</code>)", re.S)
# Where a name may be broken in a narrow cell.
BREAK_AFTER = re.compile(r"(::|[(.,/=])(?=[^\s).])")
CLOSED_IMAGE = re.compile(r"(<img [^>]*?) ?/>")
LINK_TITLE = re.compile(r'(<a class="headerlink" href="#[^"]+") title="Permanent link">#</a>')

sections = []


def text_of(markup):
    return " ".join(html.unescape(TAG.sub(" ", markup)).split())


def framed(table):
    """A table in a frame that scrolls. Where the first column has no head, its cells are the
    heads of their rows."""
    table = ALIGNED.sub(r' class="\1"', table)
    table = CODE.sub(lambda match: match[1] + BREAK_AFTER.sub(r"\1<wbr>", match[2]) + match[3], table)
    heads, split, rows = table.partition("<tbody>")
    if EMPTY_HEAD.search(heads):
        rows = FIRST_CELL.sub(r'\1<th scope="row"\2</th>', rows)
        heads = EMPTY_HEAD.sub("<td></td>", EMPTY_HEADS.sub("", heads))
    return '<div class="table">' + HEAD_CELL.sub('<th scope="col"', heads) + split + rows + "</div>"


def on_pre_build(config):
    sections.clear()


def entry_of(page, heading, url, markup):
    return {
        "page": page.title,
        "heading": text_of(heading),
        "url": url,
        "text": text_of(markup),
        "words": " ".join(SEARCH_WORDS.findall(markup)),
    }


def on_page_content(content, page, config, files):
    """A page is one entry up to its first heading, and one for each heading."""
    plain = LINK_TO_SELF.sub("", content)
    parts = HEADING.split(plain)  # text, then id, heading, text, ...
    sections.append(entry_of(page, "", page.url, parts[0]))
    for anchor, heading, markup in zip(parts[1::3], parts[2::3], parts[3::3]):
        sections.append(entry_of(page, heading, f"{page.url}#{anchor}", markup))
    content = re.sub(r"<!--.*?-->\n?", "", content, flags=re.S)
    content = LINK_TITLE.sub(r'\1 aria-label="Link to this section">#</a>', content)
    content = CLOSED_IMAGE.sub(r"\1>", content)
    return TABLE.sub(lambda match: framed(match[0]), content)


def on_post_build(config):
    target = pathlib.Path(config["site_dir"]) / "search_pages.js"
    target.write_text("const SEARCH_PAGES = " + json.dumps(sections, indent=0) + ";\n")
