#!/usr/bin/env python3
"""Writes the .inc files beside itself, from Unicode 16.0.

    pip install "unicodedata2<17" && python3 make_tables.py

Unicode 16.0 is what the regular expressions of the `tokenizers` package 0.23 know; its
normalization knows 9.0. Characters keep their decomposition for all versions to come. Python's
own unicodedata serves where it is of that version; else the unicodedata2 package.
"""

import pathlib
import sys
import unicodedata

VERSION = "16.0.0"
HERE = pathlib.Path(__file__).resolve().parent
LINE = 96

if unicodedata.unidata_version != VERSION:
    try:
        import unicodedata2 as unicodedata
    except ImportError:
        sys.exit(f"Python knows Unicode {unicodedata.unidata_version}. Install unicodedata2 {VERSION}.")
if unicodedata.unidata_version != VERSION:
    sys.exit(f"unicodedata2 knows Unicode {unicodedata.unidata_version}, not {VERSION}.")

# The numbers are those of gpt::CharacterClass.
CLASSES = {"Lu": 1, "Lt": 1, "Ll": 2, "Lm": 3, "Lo": 3, "Mn": 4, "Mc": 4, "Me": 4, "Nd": 5, "Nl": 5, "No": 5}
SPACE = 6
# The property White_Space, which Python does not have: PropList.txt.
SPACES = {*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
# The package normalizes by Unicode 9.0. These characters, which came later, have a combining class
# or compose; the package leaves them as they are.
AFTER_9 = """
    7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 105c9 105e4 10d24-10d27 10d69-10d6d
    10eab-10eac 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 11383 11385 1138e 11391 113c5 113c7-113c8
    113ce-113d0 1145e 11839-1183a 11938 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97
    11f41-11f42 16121-16128 1612f 16d68-16d6a 16ff0-16ff1 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef
    1e5ee-1e5ef
"""
# Hangul syllables are computed.
HANGUL = range(0xAC00, 0xD7A4)


def codes_of(text):
    codes = set()
    for word in text.split():
        first, _, last = word.partition("-")
        codes.update(range(int(first, 16), int(last or first, 16) + 1))
    return codes


LATER = codes_of(AFTER_9)


def class_of(code):
    return SPACE if code in SPACES else CLASSES.get(unicodedata.category(chr(code)), 0)


def write(name, tables):
    lines = ["// Written by make_tables.py, which says by what versions of Unicode."]
    for declaration, comment, numbers in tables:
        lines += ["", f"// {comment}", f"constexpr {declaration}[] = {{"]
        line = ""
        for number in numbers:
            word = f"0x{number:x},"
            if len(line) + len(word) > LINE:
                lines.append(line)
                line = ""
            line += word
        lines += [line, "};"]
    (HERE / name).write_text("\n".join(lines) + "\n")


def class_ranges():
    ranges, before = [], None
    for code in range(0x110000):
        now = class_of(code)
        if now != before:
            ranges.append(code << 3 | now)
        before = now
    return ranges


def combining_ranges():
    """Stretches of one combining class that is not 0."""
    ranges = []
    for code in range(0x110000):
        value = unicodedata.combining(chr(code))
        if value == 0 or code in LATER:
            continue
        if ranges and ranges[-1][1] == code - 1 and ranges[-1][2] == value:
            ranges[-1][1] = code
        else:
            ranges.append([code, code, value])
    return [first << 32 | (last - first) << 8 | value for first, last, value in ranges]


def decompositions():
    """Of one step, into one character or two; the highest bit says that the two compose again."""
    singles, pairs = [], []
    for code in range(0x110000):
        text = unicodedata.decomposition(chr(code))
        if not text or text.startswith("<") or code in HANGUL or code in LATER:
            continue
        parts = [int(part, 16) for part in text.split()]
        if len(parts) == 1:
            singles.append(code << 21 | parts[0])
            continue
        first, second = parts
        composes = unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(code)
        pairs.append(int(composes) << 63 | code << 42 | first << 21 | second)
    return singles, pairs


def main():
    write(
        "classes.inc",
        [("uint32_t kClassRanges", "First character << 3 | class; a stretch ends where the next begins.", class_ranges())],
    )
    write(
        "combining.inc",
        [
            (
                "uint64_t kCombiningRanges",
                "First character << 32 | (last - first) << 8 | canonical combining class.",
                combining_ranges(),
            )
        ],
    )
    singles, pairs = decompositions()
    write(
        "decompositions.inc",
        [
            ("uint64_t kSingles", "Character << 21 | what it decomposes into.", singles),
            ("uint64_t kPairs", "Whether they compose << 63 | character << 42 | first << 21 | second.", pairs),
        ],
    )


if __name__ == "__main__":
    main()
