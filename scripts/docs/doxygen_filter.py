#!/usr/bin/env python3
"""Shows Doxygen a header the way its readers see it.

Usage: doxygen_filter.py HEADER | --self-test

- A comment stands for all declarations up to the next blank line or comment:
  overloads and kin get a copy of its first paragraph.
- A plain comment behind a declaration is its description.
- TORCH_ARG(type, name) and TESSERA_OPTION(type, name) become the field that they
  declare, with its default.
- What goes without saying is left out where it has no comment: copies, moves,
  destructors, what is deleted or defaulted, `->` and `*` of handles.

Lines keep their numbers, so that warnings point into the header.
"""
import difflib
import itertools
import pathlib
import re
import sys

OPTION = re.compile(
    r"(?:TORCH_ARG|TESSERA_OPTION)\((?P<type>.*),\s*(?P<name>\w+)\)\s*(?P<default>(?:=|\{).*)", re.S)
HEAD = re.compile(r"(?:template\s*<.*>\s*)?(?:class|struct|enum|union|(?:inline\s+)?namespace)\b", re.S)
PLAIN = re.compile(
    r"= (?:delete|default);"  # deleted, defaulted
    r"|~\w+\("  # destructors
    r"|\b(\w+)\((?:const \1&|\1&&) ?\w*\)"  # copies and moves
    r"|operator=\(|operator->\(\)|operator\*\(\)")
ENUMERATOR = re.compile(r"\w+(?: = \w+)?,")
STRING = re.compile(r'"(?:\\.|[^"\\])*"')


def is_contract(line):
    return line.strip().startswith("///") and not line.strip().startswith("///<")


def code_of(line):
    return STRING.sub('""', line).split("//")[0]


def declaration(lines, first):
    """Lines of the declaration that begins at `first`, and whether it is whole:
    of a class or namespace only the head is taken."""
    depth, text = 0, ""
    for index in range(first, len(lines)):
        code = code_of(lines[index])
        text = (text + " " + code).strip()
        depth += sum(code.count(c) for c in "({") - sum(code.count(c) for c in ")}")
        if HEAD.match(text) and text.endswith("{"):
            return lines[first:index + 1], False
        if depth <= 0 and (text.endswith((";", "}")) or ENUMERATOR.fullmatch(text)):
            return lines[first:index + 1], True
    raise SystemExit(f"a declaration on line {first + 1} does not end")


def with_trailing_comment(lines):
    """`rank; // its number` becomes `rank; ///< its number`."""
    return [*lines[:-1], re.sub(r"([;,]) // (?!NOLINT)", r"\1 ///< ", lines[-1])]


def as_field(text):
    match = OPTION.search(text)
    if not match:
        return text
    field = f"{match['type']} {match['name']} {match['default']}"
    return " ".join(field.split()) + "\n" * text.count("\n")


def show(lines, comment, has_own):
    """The declaration for Doxygen. `comment` stands above it: its own, or that of
    a declaration before it."""
    text = "\n".join(with_trailing_comment(lines))
    says_itself = has_own or "///<" in text
    if not says_itself and PLAIN.search(" ".join(text.split())):
        return "\n" * text.count("\n")
    text = as_field(text)
    if comment and not says_itself:
        paragraph = itertools.takewhile(bool, comment)
        text = f"/** {' '.join(paragraph)} */ {text}"
    return text


def filtered(source):
    lines = source.split("\n")
    out, comment, index = [], [], 0
    has_own = False  # the comment is the next declaration's own
    while index < len(lines):
        line = lines[index]
        stripped = line.strip()
        if is_contract(line):
            if not has_own:
                comment = []
            comment.append(stripped[3:].strip())
            has_own = True
            out.append(line)
            index += 1
        elif stripped.startswith("#"):
            while lines[index].endswith("\\"):
                out.append(lines[index])
                index += 1
            out.append(lines[index])
            index += 1
            comment, has_own = [], False
        elif not stripped or stripped.startswith(("//", "}", "public:", "private:", "protected:")):
            out.append(line)
            index += 1
            comment, has_own = [], False
        else:
            taken, is_whole = declaration(lines, index)
            out.append(show(taken, comment, has_own) if is_whole else "\n".join(taken))
            index += len(taken)
            has_own = False
            if not is_whole:
                comment = []
    return "\n".join(out)


EXAMPLE = """\
#define TWO \\
  2
namespace a {
/// First.
///
/// More.
int one(
    int x);
int one(double x);

int bare();
class C : public A,
          public B {
 public:
  ~C();
  C(const C&) = delete;
  /// With a comment.
  C(C&& other) noexcept;
  int size() const; // how many
  int names[3]; // NOLINT: no description
  /// An option.
  TORCH_ARG(std::optional<int>, width) = std::nullopt;
  TESSERA_OPTION(Betas, betas){{0.9, 0.999}};
};
enum class E {
  Red, // as blood
  Blue,
};
}
"""
SHOWN = """\
#define TWO \\
  2
namespace a {
/// First.
///
/// More.
int one(
    int x);
/** First. */ int one(double x);

int bare();
class C : public A,
          public B {
 public:


  /// With a comment.
  C(C&& other) noexcept;
  int size() const; ///< how many
/** With a comment. */   int names[3]; // NOLINT: no description
  /// An option.
std::optional<int> width = std::nullopt;
/** An option. */ Betas betas {{0.9, 0.999}};
};
enum class E {
  Red, ///< as blood
  Blue,
};
}
"""


def self_test():
    found = filtered(EXAMPLE)
    if found == SHOWN:
        print("doxygen_filter self-test: a header is shown as it should be")
        return 0
    for line in difflib.unified_diff(SHOWN.split("\n"), found.split("\n"), "wanted", "found", lineterm=""):
        print(line)
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "--self-test":
        sys.exit(self_test())
    sys.stdout.write(filtered(pathlib.Path(sys.argv[1]).read_text()))
