"""The parts of a Markdown page that checks look at: blocks, headings, links."""
import dataclasses
import pathlib
import re

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w+-]*)\s*$")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
DIRECTIVE = re.compile(r"^\s*<!--\s*(?P<kind>code|run|file)\s*(?::\s*(?P<text>.*?))?\s*-->\s*$")
INLINE_CODE = re.compile(r"`[^`]*`")


@dataclasses.dataclass(frozen=True)
class Block:
    """Text between fences. `kind` and `directive` come from an HTML comment on
    the line above: `<!-- code: in training -->`."""

    page: str
    line: int  # of the first line of its text
    language: str
    text: str
    kind: str = ""
    directive: str = ""


@dataclasses.dataclass(frozen=True)
class Link:
    line: int
    target: str


@dataclasses.dataclass
class Page:
    path: str
    blocks: list
    links: list
    headings: list  # texts
    prose: list  # (line number, text without blocks)


def parse(path, text):
    page = Page(path, [], [], [], [])
    fence, kind, directive = None, "", ""
    for number, line in enumerate(text.split("\n"), 1):
        if fence:
            if line.strip() == fence["ticks"]:
                page.blocks.append(Block(path, fence["line"] + 1, fence["language"], "\n".join(fence["body"]),
                                         kind, directive))
                fence, kind, directive = None, "", ""
            else:
                fence["body"].append(line.removeprefix(fence["indent"]))
            continue
        match = FENCE.match(line)
        if match:
            fence = {"ticks": match["ticks"], "language": match["language"], "indent": match["indent"],
                     "line": number, "body": []}
            continue
        comment = DIRECTIVE.match(line)
        if comment:
            kind, directive = comment["kind"], comment["text"] or ""
        elif line.strip():
            kind, directive = "", ""
        page.prose.append((number, line))
        heading = HEADING.match(line)
        if heading:
            page.headings.append(heading[2])
        for link in LINK.finditer(INLINE_CODE.sub(lambda m: "`" + "x" * (len(m[0]) - 2) + "`", line)):
            page.links.append(Link(number, link["target"]))
    if fence:
        raise SystemExit(f"{path}:{fence['line']}: a block that does not end")
    return page


def pages(root):
    """All pages whose links and code are checked, by their path from the root."""
    paths = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")]
    paths += sorted((root / "docs").rglob("*.md")) + sorted((root / "examples").rglob("README.md"))
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in paths
        if path.is_file()
    }


def root():
    return pathlib.Path(__file__).resolve().parent.parent.parent
