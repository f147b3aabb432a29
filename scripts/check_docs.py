#!/usr/bin/env python3
"""Checks that what the documents say is so.

Usage: check_docs.py [--self-test] [--write-diff] [--program TESSERA] [--site FOLDER]

- Relative links and #anchors of README, CONTRIBUTING, CHANGELOG, docs/, and the
  READMEs of examples/ and bench/ lead somewhere, on GitHub and on the site.
- Every environment variable that src/ reads is in docs/environment.md, and the
  other way round.
- Every name of ours in the tables of docs/from-python.md is in include/.
- The program in docs/tutorial.md is examples/before.cpp, and the diff is that to
  after.cpp; --write-diff puts both there.
- With --program, the built `tessera`: subcommands and flags in shell blocks and in
  docs/from-python.md are in its --help; targets of make are in the Makefile.
- With --site, the built site: no page loads anything from a network.
"""
import argparse
import difflib
import functools
import pathlib
import posixpath
import re
import shlex
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "docs"))
import markdown  # noqa: E402

# ---- Links ------------------------------------------------------------------


def anchors_on_github(headings):
    """As GitHub makes them: https://github.com/gjtorikian/html-pipeline's rules."""
    seen, result = {}, set()
    for heading in headings:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


def anchors_on_site(headings):
    """As Python-Markdown's toc extension makes them."""
    seen, result = set(), set()
    for heading in headings:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        unique, count = slug, 0
        while unique in seen:
            count += 1
            unique = f"{slug}_{count}"
        seen.add(unique)
        result.add(unique)
    return result


def has_anchor(page, anchor):
    if anchor not in anchors_on_github(page.headings):
        return False
    return not page.path.startswith("docs/") or anchor in anchors_on_site(page.headings)


def check_links(pages, exists):
    """`exists(path)`: whether a file or folder is in the repository."""
    for page in pages.values():
        for link in page.links:
            if re.match(r"[a-z]+:", link.target):
                continue
            path, _, anchor = link.target.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page.path), path)) if path else page.path
            where = f"{page.path}:{link.line}"
            if target.startswith(".."):
                yield f"{where}: {link.target} leads out of the repository"
            elif page.path.startswith("docs/") and not target.startswith("docs/"):
                yield f"{where}: {link.target} leads out of docs/, where the site ends; name the file instead"
            elif not exists(target):
                yield f"{where}: {link.target} leads nowhere"
            elif anchor and target not in pages:
                yield f"{where}: {link.target} has an anchor, and {target} is no page"
            elif anchor and not has_anchor(pages[target], anchor):
                yield f"{where}: {target} has no heading for #{anchor}, on GitHub and on the site"


# ---- Files that pages name --------------------------------------------------

FILES = re.compile(r"`((?:src|include|tests|scripts|examples|cmake)/[\w./-]*\w)`")
HEADERS = re.compile(r"`((?:[a-z]+/)?[a-z_]+\.h)`")


def check_files(texts, exists):
    """`texts`: {path: text} of the pages. docs/api.md names headers below tessera/."""
    for path, text in sorted(texts.items()):
        named = FILES.findall(text)
        if path == "docs/api.md":
            named += ["include/tessera/" + header for header in HEADERS.findall(text)]
        for name in named:
            if not exists(name):
                yield f"{path}: {name} is not in the repository"


# ---- Environment variables --------------------------------------------------

NAMES = re.compile(r'"(TESSERA_[A-Z][A-Z_]*)"')


def check_environment(sources, page):
    """Any string that is the name of such a variable counts as read: how they are
    read differs."""
    read = {name: path for path, text in sources.items() for name in NAMES.findall(text)}
    told = set(re.findall(r"`(TESSERA_[A-Z][A-Z_]*)`", page))
    for name in sorted(set(read) - told):
        yield f"{read[name]} reads {name}, and docs/environment.md does not tell of it"
    for name in sorted(told - set(read)):
        yield f"docs/environment.md tells of {name}, and nothing in src/ reads it"
    if not read:
        yield "src/ reads no variable: this check has lost its way"


# ---- From Python ------------------------------------------------------------

# Not ours: qualified names of others, words of C++, a LibTorch class.
FOREIGN_NAME = re.compile(r"\b(?:torch|at|c10|std)(?:::\w+)+")
FOREIGN = {"true", "false", "nullptr", "const", "auto", "operator", "Sequential", "forward"}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def our_cells(page):
    """(line, cell) of the column "here" of each table."""
    column = None
    for number, line in page.prose:
        if not line.startswith("|"):
            column = None
        elif column is None:
            heads = [head.lower() for head in cells_of(line)]
            column = heads.index("here") if "here" in heads else -1
        elif column >= 0 and not set(line) <= set("|-: "):
            cells = cells_of(line)
            if column < len(cells):
                yield number, cells[column]


MEMBERS = re.compile(r"\b([A-Z]\w+)(?:\(\))?((?:(?:::|\.)[a-zA-Z]\w*(?:\([^()]*\))?)+)")


def strangers_of(code, headers):
    """Members in `Type::member` and `Type().option(...)` that no header which
    declares the type mentions."""
    for kind, members in MEMBERS.findall(code):
        homes = [names for text, names in headers if re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)*{kind}\b", text)]
        for name in re.findall(r"(?:::|\.)(\w+)", members):
            if homes and not any(name in names for names in homes):
                yield f"{kind} has no {name}"


def check_names(page, headers):
    """`headers`: (text, identifiers) of each header of include/."""
    declared = set().union(*(names for _, names in headers))
    count = 0
    for number, cell in our_cells(page):
        for code in re.findall(r"`([^`]+)`", cell):
            if code.startswith(("tessera ", "--", "-", "make ", "TESSERA_", "docs/")):
                continue
            code = FOREIGN_NAME.sub("", re.sub(r'"[^"]*"', "", re.sub(r"//.*", "", code)))
            yield from (f"{page.path}:{number}: {problem} (in `{code}`)" for problem in strangers_of(code, headers))
            for name in IDENTIFIER.findall(code):
                # Arguments in lower case are the reader's own: model, optimizer, m.
                if name in FOREIGN or len(name) < 3 or not is_call(code, name):
                    continue
                count += 1
                if name not in declared:
                    yield f"{page.path}:{number}: {name} (in `{code}`) is not in include/"
    if count < 100:
        yield f"{page.path}: only {count} names found in its tables: this check has lost its way"


def is_call(code, name):
    """A type, a macro, a call, or a member: all but the variables passed to it."""
    return bool(re.search(rf"(?:^|::|\.|->|[A-Z]){re.escape(name)}\b|\b{re.escape(name)}(?:<|\(|::|\{{)", code)) or (
        name[0].isupper() or code.strip() == name)


# ---- Shell ------------------------------------------------------------------

SHELL = {"", "sh", "bash", "console"}
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")
# Commands that start other programs, whose flags are not ours.
WORDS_BEFORE = {"time", "sudo", "env", "$"}


def commands_of(block):
    """Command lines of a block, those that continue joined."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    is_console = any(line.startswith("$ ") for line in text.split("\n"))
    for offset, line in enumerate(text.split("\n")):
        if is_console and not line.startswith("$ "):
            continue
        line = re.sub(r"\s#.*$", "", line.removeprefix("$ "))
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        while words and (words[0] in WORDS_BEFORE or ASSIGNMENT.match(words[0])):
            words = words[1:]
        if words:
            yield block.line + offset, words


def check_tessera_words(words, help_of):
    """`help_of(words)`: the --help of a subcommand, or None if there is none."""
    sub = []
    for word in words[1:]:
        if re.match(r"[a-z]+$", word) and help_of(tuple(sub + [word])) is not None:
            sub.append(word)
        else:
            break
    if not sub:
        if words[1:] and not words[1].startswith("-"):
            yield f"tessera has no subcommand {words[1]}"
        return
    text = help_of(tuple(sub))
    is_value = False
    for word in words[1 + len(sub):]:
        flag = re.match(r"--?[a-z][\w-]*", word.strip("[]"))
        if flag:
            in_help = re.search(rf"(?<![\w-]){re.escape(flag[0])}(?![\w-])(?:,--[\w-]+)?(?P<value> [A-Z]+)?", text)
            if not in_help:
                yield f"tessera {' '.join(sub)} has no {flag[0]}"
            is_value = bool(in_help and in_help["value"] and "=" not in word)
        elif sub == ["run"] and not is_value:
            break  # the program; what follows is its own
        else:
            is_value = False


def check_shell(pages, help_of, make_targets):
    for page in pages.values():
        for block in page.blocks:
            if block.language not in SHELL:
                continue
            for line, words in commands_of(block):
                where = f"{page.path}:{line}"
                if posixpath.basename(words[0]) == "tessera" and len(words) > 1:
                    for problem in check_tessera_words(words, help_of):
                        yield f"{where}: {problem}"
                elif words[0] == "make" and len(words) > 1:
                    for word in words[1:]:
                        if re.match(r"[a-z-]+$", word) and word not in make_targets:
                            yield f"{where}: make has no target {word}"


def check_flags(page, help_of):
    """Flags in the column "here" of docs/from-python.md."""
    for number, cell in our_cells(page):
        for code in re.findall(r"`((?:tessera |--|-)[^`]*)`", cell):
            words = shlex.split(code if code.startswith("tessera ") else "tessera run " + code)
            for problem in check_tessera_words(words, help_of):
                yield f"{page.path}:{number}: {problem}"


def helper_of(program):
    @functools.cache
    def help_of(sub):
        done = subprocess.run([program, *sub, "--help"], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    return help_of


# ---- The program and the diff of the tutorial -------------------------------

PROGRAM_BEGINS = "<!-- file: train.cpp -->"
DIFF_BEGINS = "<!-- diff: examples/before.cpp examples/after.cpp -->"


def diff_of(before, after):
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "a/train.cpp", "b/train.cpp", lineterm="", n=2)
    return "\n".join(line.rstrip() for line in lines)


def with_block(page, mark, language, text):
    """The page with `text` in the block below the mark."""
    begin = page.find(mark)
    block = re.compile(rf"\n```{language}\n(.*?)\n```\n", re.S)
    match = block.match(page, begin + len(mark)) if begin >= 0 else None
    if not match:
        raise SystemExit(f"docs/tutorial.md: {mark} and a block of {language} below it are missing")
    return page[:match.start(1)] + text + page[match.end(1):]


def with_examples(page, before, after):
    """The page with the program and the diff of now."""
    page = with_block(page, PROGRAM_BEGINS, "cpp", before.rstrip("\n"))
    return with_block(page, DIFF_BEGINS, "diff", diff_of(before, after))


def check_examples(page, before, after):
    if with_examples(page, before, after) != page:
        yield "docs/tutorial.md: its program or its diff is not that of the examples: scripts/check_docs.py --write-diff"


# ---- The built site ---------------------------------------------------------

LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc\s*=\s*["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b[^>]*\bhref\s*=\s*["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+(?:url\()?|url\()["']?((?:https?:)?//[^"')\s]+)""", re.I)


def check_site(files):
    """`files`: {path: text} of the pages, styles and scripts of the site."""
    for path, text in sorted(files.items()):
        for match in LOADS.finditer(text):
            yield f"{path}: loads {next(filter(None, match.groups()))} from a network"
    if not any(path.endswith(".html") for path in files):
        yield "the site has no pages: build it first"


# ---- Self-test --------------------------------------------------------------

GOOD_PAGES = {
    "README.md": "# One\n\n[a](docs/a.md#two-words) [b](docs/b.md) [c](#one) [x](https://example.org/gone)\n",
    "docs/a.md": "# A\n\n## Two words\n\n`[not](a-link.md)`\n\n```\n[nor](this.md)\n```\n",
    "docs/b.md": "# B\n\n## `code` and more\n\n[up](a.md) [self](#code-and-more)\n",
}
HELPS = {("run",): "run\n  -n,--nproc-per-node INT\n  --max-restarts INT  Text\n  --tee  Print", ("ckpt",): "ckpt", ("ckpt", "verify"): "PATH"}


def parsed(pages):
    return {path: markdown.parse(path, text) for path, text in pages.items()}


def self_test():
    """Each rule is shown a good case, which must pass, and bad ones, which must not."""
    failures = []

    def expect(name, problems, wanted):
        found = list(problems)
        if wanted is None and found:
            failures.append(f"{name}: should pass, found {found}")
        elif wanted is not None and not any(wanted in problem for problem in found):
            failures.append(f"{name}: expected {wanted!r}, found {found or 'nothing'}")

    def links(extra):
        pages = {**GOOD_PAGES, **extra}
        return check_links(parsed(pages), lambda path: path in pages)

    files = {"src/a/b.h", "include/tessera/a/b.h"}.__contains__
    expect("good files", check_files({"docs/api.md": "`src/a/b.h` `a/b.h`"}, files), None)
    expect("missing file", check_files({"docs/x.md": "`src/a/c.h`"}, files), "src/a/c.h is not in")
    expect("missing header", check_files({"docs/api.md": "`a/c.h`"}, files), "include/tessera/a/c.h is not in")

    expect("good links", links({}), None)
    expect("missing page", links({"docs/c.md": "[x](gone.md)"}), "docs/c.md:1: gone.md leads nowhere")
    expect("missing anchor", links({"docs/c.md": "\n[x](a.md#three)"}), "docs/c.md:2")
    expect("missing own anchor", links({"docs/c.md": "[x](#three)"}), "no heading")
    expect("anchor of one renderer only", links({"docs/c.md": "## a & b\n[x](#a--b)"}), "no heading")
    expect("out of docs", links({"docs/c.md": "[x](../README.md)"}), "leads out of docs/")
    expect("out of the repository", links({"README.md": "[x](../y.md)"}), "out of the repository")

    expect("good variables", check_environment({"a.cpp": 'f("TESSERA_X")'}, "`TESSERA_X`"), None)
    expect("untold", check_environment({"a.cpp": 'f("TESSERA_X")'}, "TESSERA_X"), "does not tell")
    expect("unread", check_environment({"a.cpp": 'f("TESSERA_X")'}, "`TESSERA_X` `TESSERA_Y`"), "nothing in src/")

    table = "| Python | here |\n| --- | --- |\n" + "| `x` | `Known(known())` |\n" * 60
    headers = [("class Known {}", {"Known", "known", "own"}), ("struct Other {}", {"Other", "others"})]
    expect("good names", check_names(markdown.parse("t.md", table + "| `x` | `Known().own(1).known(torch::gone(m), true)` |"), headers), None)
    for cell in ("Unknown", "model.unknown()", "Known::unknown", "unknown(*m)", "space::unknown(m)"):
        page = markdown.parse("t.md", table + f"| `y` | `{cell}` |\n")
        expect(f"name {cell}", check_names(page, headers), "is not in include/")
    for cell in ("Known::others", "Known().own(1).others(2)"):
        page = markdown.parse("t.md", table + f"| `y` | `{cell}` |\n")
        expect(f"member {cell}", check_names(page, headers), "Known has no others")
    expect("no names", check_names(markdown.parse("t.md", "text"), headers), "lost its way")

    def shell(text):
        return check_shell(parsed({"a.md": f"```\n{text}\n```"}), HELPS.get, {"test", "docs"})

    expect("good shell", shell("$ X=1 tessera run -n 2 \\\n  --tee --max-restarts=1 ./p --own\noutput --gone\n$ make docs X=1"),
           None)
    expect("good shell without dollars", shell("tessera ckpt verify PATH   # text --gone\nmake test"), None)
    expect("flag", shell("tessera run --max-restart 3 ./p"), "has no --max-restart")
    expect("short flag", shell("tessera run -m 3 ./p"), "has no -m")
    expect("subcommand", shell("tessera gone x"), "no subcommand gone")
    expect("subsubcommand flag", shell("build/bin/tessera ckpt verify --all x"), "has no --all")
    expect("make target", shell("make tests"), "no target tests")
    flags = "| Python | here |\n| --- | --- |\n| `y` | `{}` |\n"
    expect("good flag", check_flags(markdown.parse("t.md", flags.format("--max-restarts 3")), HELPS.get), None)
    expect("bad flag", check_flags(markdown.parse("t.md", flags.format("--standalone")), HELPS.get), "no --standalone")

    page = f"{PROGRAM_BEGINS}\n```cpp\n\n```\nx\n{DIFF_BEGINS}\n```diff\n\n```\ny\n"
    current = with_examples(page, "a\nb\n", "a\nc\n")
    expect("good examples", check_examples(current, "a\nb\n", "a\nc\n"), None)
    expect("stale diff", check_examples(current, "a\nb\n", "a\nd\n"), "is not that of the examples")
    expect("stale program", check_examples(current.replace("\nb\n", "\nx\n", 1), "a\nb\n", "a\nc\n"), "is not that of the examples")

    expect("good site", check_site({"a.html": '<a href="https://x.y"><script src="s.js">'}), None)
    expect("script", check_site({"a.html": '<script src="https://x.y/z.js">'}), "https://x.y/z.js")
    expect("style", check_site({"a.html": "", "a.css": "@import url(//fonts.x/y)"}), "//fonts.x/y")
    expect("no site", check_site({}), "no pages")

    for failure in failures:
        print(f"check_docs self-test: {failure}")
    if not failures:
        print("check_docs self-test: every rule passes what is right and finds what is not")
    return bool(failures)


# ---- Main -------------------------------------------------------------------


def headers_of(folder):
    texts = [path.read_text() for path in sorted(folder.rglob("*.h"))]
    return [(text, set(IDENTIFIER.findall(text))) for text in texts]


def make_targets_of(makefile):
    return set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--write-diff", action="store_true")
    parser.add_argument("--program")
    parser.add_argument("--site", type=pathlib.Path)
    options = parser.parse_args()
    if options.self_test:
        return self_test()

    root = markdown.root()
    before, after = ((root / "examples" / name).read_text() for name in ("before.cpp", "after.cpp"))
    tutorial = root / "docs/tutorial.md"
    if options.write_diff:
        tutorial.write_text(with_examples(tutorial.read_text(), before, after))
        return 0

    texts = markdown.pages(root)
    pages = parsed(texts)
    sources = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in (root / "src").rglob("*")
        if path.suffix in {".h", ".cpp"}
    }
    from_python = pages["docs/from-python.md"]
    problems = [
        *check_links(pages, lambda path: (root / path).exists()),
        *check_files(texts, lambda path: (root / path).exists()),
        *check_environment(sources, texts["docs/environment.md"]),
        *check_names(from_python, headers_of(root / "include")),
        *check_examples(texts["docs/tutorial.md"], before, after),
    ]
    if options.program:
        help_of = helper_of(options.program)
        problems += check_shell(pages, help_of, make_targets_of((root / "Makefile").read_text()))
        problems += check_flags(from_python, help_of)
    if options.site:
        problems += check_site({
            path.relative_to(options.site).as_posix(): path.read_text(errors="replace")
            for path in options.site.rglob("*")
            if path.suffix in {".html", ".css", ".js", ".svg"}
        })
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(pages)} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
