#!/usr/bin/env python3
"""Makes one program of all C++ in the documents, so that CI compiles and runs it.

Usage: doc_programs.py OUT [--parts N] | --list | --self-test

OUT gets part_1.cpp, ..., part_N.cpp, each with some of the blocks, written only
if they changed. `doc_code` (tests/docs/doc_code.cpp) is linked from them and runs
the blocks, one after another, on the ranks that it is started on.

Every block of ```cpp in README.md and docs/ is one of these:

- A whole program, which has `int main` as its last function. It is run as it is;
  its #include lines are checked against those that a reader needs.
- A fragment. An HTML comment above it says where it stands:
    <!-- code: in training -->      inside a function, after the names of the
                                    prelude `training` in tests/docs/preludes.inc
    <!-- code: continues -->        after the block before it, in the same function
    <!-- code: at file scope -->    declarations; visible in later blocks of the page
  `, throws` behind it says that it must throw, on rank 0 of two. A block of text
  after it, under <!-- code: thrown -->, is the message: numbers aside, "..." for
  anything.
- Not C++ that could run here: <!-- code: not compiled: REASON -->. There are few.
- A file of the reader's, <!-- file: NAME -->: the page's commands compile it, and
  doc_shell.py runs these.
"""
import argparse
import dataclasses
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "docs"))
import markdown  # noqa: E402

PRELUDE = re.compile(r"^//@ (\w+)\b.*$", re.M)
INCLUDE = re.compile(r"^\s*#include\s*[<\"]([^>\"]+)[>\"].*$", re.M)
MAIN = re.compile(r"\bint\s+main\s*\(")
IN = re.compile(r"(?:in (?P<prelude>\w+)|(?P<continues>continues))(?P<throws>, throws)?$")
ANYTHING = "..."
# More blocks than this that nobody compiles would be a habit.
MAX_NOT_COMPILED = 6


class Wrong(Exception):
    """A block that does not say what it is."""


@dataclasses.dataclass
class Unit:
    """What is compiled together and run once."""

    name: str  # of the function
    title: str  # "docs/fsdp.md:12"
    kind: str  # program, fragment
    blocks: list
    prelude: str = ""
    throws: str = ""


def preludes_of(text):
    parts = PRELUDE.split(text)
    return dict(zip(parts[1::2], (body.strip("\n") for body in parts[2::2])))


def sort_block(block, page_units, preludes):
    """Adds the block to the units of its page. Returns why it is not compiled."""
    title = f"{block.page}:{block.line}"
    name = re.sub(r"\W", "_", title)
    if block.kind == "code" and block.directive.startswith("not compiled: "):
        return block.directive.removeprefix("not compiled: ")
    if MAIN.search(block.text):
        page_units.append(Unit(name, title, "program", [block]))
        return None
    if block.kind != "code":
        raise Wrong(f"{title}: a fragment, and no comment above it says where it stands: <!-- code: in NAME -->")
    if block.directive == "at file scope":
        page_units.append(Unit(name, title, "declarations", [block]))
        return None
    match = IN.match(block.directive)
    if not match:
        raise Wrong(f'{title}: "code: {block.directive}" is none of: in NAME, continues, at file scope, not compiled: WHY')
    if match["continues"]:
        if not page_units or page_units[-1].kind != "fragment":
            raise Wrong(f"{title}: continues, and there is no fragment before it")
        page_units[-1].blocks.append(block)
        page_units[-1].throws = ANYTHING if match["throws"] else ""
        return None
    if match["prelude"] not in preludes:
        raise Wrong(f"{title}: there is no prelude {match['prelude']}; there are {', '.join(preludes)}")
    page_units.append(Unit(name, title, "fragment", [block], match["prelude"],
                           ANYTHING if match["throws"] else ""))
    return None


def units_of(pages, preludes):
    """{page: units}, and what is not compiled as (title, reason)."""
    result, left_out = {}, []
    for path, page in pages.items():
        units = []
        for block in page.blocks:
            if block.kind == "code" and block.directive == "thrown":
                if not units or units[-1].throws != ANYTHING:
                    raise Wrong(f"{path}:{block.line}: a message, and the block before it is not said to throw")
                units[-1].throws = block.text
            elif block.language in ("cpp", "c++") and block.kind != "file":
                reason = sort_block(block, units, preludes)
                if reason is not None:
                    left_out.append((f"{path}:{block.line}", reason))
        if units:
            result[path] = units
    if len(left_out) > MAX_NOT_COMPILED:
        raise Wrong(f"{len(left_out)} blocks are not compiled, more than {MAX_NOT_COMPILED}: " + str(left_out))
    return result, left_out


def code_of(block):
    """The block, with its place for the compiler's messages."""
    text = INCLUDE.sub("", block.text)
    if MAIN.search(text):
        # Only a function that is called main may end without a return.
        text = MAIN.sub("int program_main(", text).rstrip().removesuffix("}") + "return 0; }"
    return f'#line {block.line} "{block.page}"\n{text}\n'


def function_of(unit, preludes):
    body = "".join("{\n" + code_of(block) for block in unit.blocks) + "}" * len(unit.blocks)
    return f"void {unit.name}() {{\n{preludes[unit.prelude]}\n{body}\n}}\n"


def source_of(page_units, preludes):
    """One page: a namespace, so that pages do not see each other's names."""
    out = []
    for path, units in page_units:
        inside, entries = [], []
        for unit in units:
            if unit.kind == "declarations":
                inside.append(code_of(unit.blocks[0]))
            elif unit.kind == "program":
                inside.append(f"namespace {unit.name}_program {{\n{code_of(unit.blocks[0])}}}\n")
                entries.append((unit, f"{unit.name}_program::program_main"))
            else:
                inside.append(function_of(unit, preludes))
                entries.append((unit, unit.name))
        page = re.sub(r"\W", "_", path)
        registrations = "".join(
            f'const Registered {unit.name}_entry{{"{unit.title}", "{escape(unit.throws)}", [] {{ {call}(); }}}};\n'
            for unit, call in entries)
        out.append(f"namespace {page} {{\n{''.join(inside)}{registrations}}} // namespace {page}\n")
    includes = includes_of(units for _, units in page_units)
    return ("// Made by scripts/doc_programs.py from the documents.\n"
            '#include "docs/doc_code.h"\n\n' + includes + "\n" + "\n".join(out))


def escape(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def includes_of(pages):
    names = sorted({
        name
        for units in pages
        for unit in units
        for block in unit.blocks
        for name in INCLUDE.findall(block.text)
    })
    return "".join(f"#include <{name}>\n" for name in names)


def divided(units, num_parts):
    """Pages over parts, the longest first, each to the shortest part so far."""
    parts = [[] for _ in range(num_parts)]
    sizes = [0] * num_parts
    def length(item):
        return sum(len(block.text) for unit in item[1] for block in unit.blocks)
    for item in sorted(units.items(), key=length, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += length(item)
    return parts


def check_includes(units):
    """A whole program has what it needs: LibTorch and Tessera at least."""
    for page_units in units.values():
        for unit in page_units:
            if unit.kind == "program":
                names = INCLUDE.findall(unit.blocks[0].text)
                for needed in ("torch/torch.h", "tessera/tessera.h"):
                    if needed not in names:
                        raise Wrong(f"{unit.title}: a whole program that does not include <{needed}>")
                text = unit.blocks[0].text
                for header, use in (("iostream", "std::cout"), ("cstdio", "printf("), ("fstream", "fstream")):
                    if use in text and header not in names:
                        raise Wrong(f"{unit.title}: uses {use} and does not include <{header}>")


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def self_test():
    preludes = preludes_of("//@ training: x\nint a = 1;\n//@ other\n")
    good = {"a.md": '```cpp\n#include <torch/torch.h>\n#include <tessera/tessera.h>\nint main() {}\n```\n'
                    '<!-- code: at file scope -->\n```cpp\nstruct S {};\n```\n'
                    '<!-- code: in training -->\n```cpp\na = 2;\n```\n'
                    '<!-- code: continues, throws -->\n```cpp\na = 3;\n```\n<!-- code: thrown -->\n```\nno "x"\n```\n'
                    "<!-- code: not compiled: a reason -->\n```cpp\nx y z\n```\n"
                    "<!-- file: main.cpp -->\n```cpp\nx y z\nint main() {}\n```\n"}
    bad = {
        "no comment": "```cpp\na = 2;\n```",
        "is none of": "<!-- code: somewhere -->\n```cpp\na = 2;\n```",
        "no prelude": "<!-- code: in gone -->\n```cpp\na = 2;\n```",
        "no fragment before": "<!-- code: continues -->\n```cpp\na = 2;\n```",
        "not said to throw": "<!-- code: in other -->\n```cpp\n```\n<!-- code: thrown -->\n```\nno\n```",
        "does not include": "```cpp\n#include <torch/torch.h>\nint main() {}\n```",
        "not compiled, more": "<!-- code: not compiled: x -->\n```cpp\na\n```\n" * (MAX_NOT_COMPILED + 1),
    }

    def run(texts):
        units, left_out = units_of({path: markdown.parse(path, text) for path, text in texts.items()}, preludes)
        check_includes(units)
        return units, left_out

    failures = []
    units, left_out = run(good)
    source = source_of(units.items(), preludes)
    for wanted in ("int program_main(", "struct S", "int a = 1;", "a = 3;", r'"no \"x\""', '#line 12 "a.md"'):
        if wanted not in source:
            failures.append(f"the source lacks {wanted!r}")
    if "x y z" in source or left_out != [("a.md:24", "a reason")]:
        failures.append(f"left out: {left_out}")
    for wanted, text in bad.items():
        try:
            run({"b.md": text})
            failures.append(f"{text!r} should be refused")
        except Wrong as wrong:
            if wanted not in str(wrong):
                failures.append(f"{text!r}: expected {wanted!r}, got {wrong}")
    for failure in failures:
        print(f"doc_programs self-test: {failure}")
    if not failures:
        print(f"doc_programs self-test: {len(bad)} wrong pages refused, a right one taken")
    return bool(failures)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    root = markdown.root()
    preludes = preludes_of((root / "tests/docs/preludes.inc").read_text())
    pages = {path: markdown.parse(path, text) for path, text in markdown.pages(root).items()}
    try:
        units, left_out = units_of(pages, preludes)
        check_includes(units)
    except Wrong as wrong:
        print(f"doc_programs: {wrong}", file=sys.stderr)
        return 1
    if options.list:
        for page_units in units.values():
            for unit in page_units:
                print(f"{unit.title}  {unit.kind}")
        for title, reason in left_out:
            print(f"{title}  not compiled: {reason}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(divided(units, options.parts), 1):
        write_if_changed(options.out / f"part_{number}.cpp", source_of(part, preludes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
