#!/usr/bin/env python3
"""Writes the tokenizers and goldens.json beside itself, with Hugging Face's package.

    pip install tokenizers==0.23.3 && python3 make_tokenizer_goldens.py

Each tokenizer learns from this repository's pages, then says what tokens texts have. Where
there are many texts goldens.json keeps a checksum of their tokens (CRC-32).
"""

import array
import json
import pathlib
import random
import zlib

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VOCABULARY = 480
BLOCK = 4096
SEPARATOR = 0xFFFFFFFF
# Planes with characters. In the others each character stands alone.
FULL_PLANES = {0, 1, 2, 3, 14}

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
SPACES = r"\s+(?!\S)|\s+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
OTHER = r"[^\r\n\p{L}\p{N}]?"
REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + SPACES
PATTERNS = {
    "gpt2": CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + SPACES,
    "llama3": f"(?i:{CONTRACTIONS})|{OTHER}" + r"\p{L}+|\p{N}{1,3}" + REST,
    "qwen2": f"(?i:{CONTRACTIONS})|{OTHER}" + r"\p{L}+|\p{N}" + REST,
    "qwen35": f"(?i:{CONTRACTIONS})|{OTHER}" + r"[\p{L}\p{M}]+|\p{N}" + REST.replace(r"\p{L}", r"\p{L}\p{M}"),
    "o200k": f"{OTHER}{UPPER}*{LOWER}+(?i:{CONTRACTIONS})?|{OTHER}{UPPER}+{LOWER}*(?i:{CONTRACTIONS})?"
    + r"|\p{N}{1,3}"
    + REST_SLASH,
    "tekken": f"{OTHER}{UPPER}*{LOWER}+|{OTHER}{UPPER}+{LOWER}*" + r"|\p{N}" + REST_SLASH,
}

SENTENCES = [
    "", " ", "  ", "\n", "\n\n", "\t", "a", " a", "  a", "a ", "a  ", "Hello world", "Hello, world!  How are you?\n",
    "I'm he's they're we've you'll I'd don't", "I'M HE'S THEY'RE WE'VE YOU'LL I'D DON'T", "it'ſ 'ſ ''s '' ' 's'S'l'L'LL'r",
    "x = 12345678901; y=3.14159e-10", "1 12 123 1234 12345 ١٢٣٤٥ १२३४ ⅷ ² ½", "int main() {\n    return 0;\n}\n\n\n",
    "tab\tand\ttab \t mixed   \n  \r\n \r \n\r\n end", "a/b//c/ /\n/\n\n...\n\n  ...  \n", "camelCaseWord HTTPServer XMLHttpRequest ABCdefGHI",
    "über Ärger naïve café", "cafe\u0301 e\u0301\u0323 \u0301a\u0301A\u0301\u0301AB", "Привет, мир! Как дела?", "Ελληνικά ΆΈΉ",
    "你好，世界！今天天气很好。", "こんにちは世界 カタカナ ｶﾀｶﾅ", "안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af", "مرحبا بالعالم", "שלום עולם",
    "नमस्ते दुनिया", "ภาษาไทย", "ǅ ǈungla ʰʷ ªº", "👨‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️", "\u00a0\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u2060",
    "\u0085next\u2028line\u2029paragraph", "\ufeffbom \ufffd \U0010ffff \ue000 \u0378", "\x00\x01\x7f\x80", "Ω Å K ﬁ ﬀ ﬆ 'ﬆ",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|><|endoftext|>", "<|endoftext|", "<|x|> <|x|>y <|xy|>",
    "one <left>two <right> three  <left>  four\n<right>\nfive", "<right> <left> <both> <both>", "w\u00f6rd wo\u0308rd word", "tesseractesseract tesserae",
]

POOLS = [
    [" ", "  ", "\n", "\r\n", "\t", " \n", "\u00a0", "\u3000", "\u2009", "\u0085", "\u2028", "\x0b", "\x0c", "\x1c"],
    ["'s", "'S", "'t", "'re", "'RE", "'Ve", "'m", "'ll", "'lL", "'d", "'", "’s", "'ſ", "'l", "'r"],
    ["the", "Quick", "BROWN", "fox", "tessera", "A", "b", "Z", "iPhone", "McDonald", "É", "ß", "ẞ", "ſ"],
    ["0", "7", "42", "365", "1024", "٣", "९", "²", "Ⅷ", "１", "𝟘", "𑁦"],
    list("!?.,;:-_/\\|@#$%^&*()[]{}<>+=~`\"") + ["...", "//", "->", "—", "«", "»", "€", "¬", "¿"],
    ["\u0301", "\u0308", "\u0323", "\u0327", "\u0345", "\u0340", "\u0344", "\u093c", "\u3099", "\u20dd", "\ufe0f", "\u1dce", "\u302a"],
    ["é", "ở", "ǖ", "Ǆ", "ǅ", "ǆ", "ʰ", "ª", "Ω", "Å", "ﬁ", "Ж", "ж", "Σ", "ς", "ა", "Ა", "Ꭰ", "ꭰ"],
    ["漢", "字", "\uf900", "\U0002f800", "か", "が", "ガ", "ー", "각", "\u1100", "\u1161", "\u11a8", "뙠"],
    ["ا", "ל", "क", "ड़", "ো", "\u09c7", "\u09be", "ไ", "ย", "\u0f71\u0f72", "\u0f73", "ཀ", "𑄮", "\U00011131\U00011127"],
    ["👍", "🏽", "\u200d", "👩", "❤", "🇩", "🇪", "\U000e0067", "\ue000", "\U000f0000", "\u0378", "\ufffe", "\u200b"],
    ["<|endoftext|>", "<|x|>", "<|xy|>", "<left>", "<right>", "<both>", "<|", "|>", "wo\u0308rd", "w\u00f6rd"],
]


def random_texts(count):
    numbers = random.Random(20)
    texts = []
    for _ in range(count):
        pools = numbers.sample(POOLS, numbers.randint(1, 5))
        texts.append("".join(numbers.choice(numbers.choice(pools)) for _ in range(numbers.randint(1, 14))))
    # Marks in every order, for normalization.
    marks = POOLS[5] + ["\u0f71", "\u0f72", "\u05b0", "\u05b1", "\u064b", "\u0e38", "\u1037", "\u094d", "\u0334", "\u031b"]
    letters = ["a", "e", "ă", "ơ", "ρ", "ώ", "き", "\u1100", "क", "ཀ", "\u0041"]
    for _ in range(count // 4):
        texts.append("".join(numbers.choice(letters) + "".join(numbers.choices(marks, k=numbers.randint(1, 5))) for _ in range(3)))
    return texts


REPEATS = [["a", 6000], ["ab", 3000], [" ", 5000], ["\n", 3000], ["é", 2000], ["the ", 2000], ["\u0301", 1500], ["1", 4000], ["A\u0301", 1500], ["=-", 2500]]


def checksum(lists):
    """Of the lists, each followed by a separator."""
    value = 0
    for numbers in lists:
        value = zlib.crc32(array.array("I", [*numbers, SEPARATOR]).tobytes(), value)
    return value


def learned_text():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.read_text() for page in pages] + SENTENCES * 20


def split(name, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), behavior, invert=invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def learn(pre_tokenizer, normalizer=None, alphabet=None, specials=("<|endoftext|>",), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
        limit_alphabet=256 if alphabet is None else 60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(learned_text(), trainer)
    return tokenizer


def changed(tokenizer, change):
    """The tokenizer after a change to its file that its interface does not offer."""
    file = json.loads(tokenizer.to_str())
    change(file)
    text = json.dumps(file, ensure_ascii=False)
    return Tokenizer.from_str(text), text


def with_old_merges(file):
    file["model"]["merges"] = ["#version: 0.2"] + [" ".join(merge) for merge in file["model"]["merges"]]


def with_whole_words(file):
    for word in ["Ġtesseract", "Ġtesserae", "abracadabra"]:
        file["model"]["vocab"][word] = len(file["model"]["vocab"])
    file["model"]["ignore_merges"] = True
    del file["model"]["dropout"], file["truncation"], file["padding"]
    for token in file["added_tokens"]:
        assert token["id"] < len(file["model"]["vocab"])


def build():
    """Tokenizers by name, with the text of their files."""
    result = {}
    gpt2 = learn(pre_tokenizers.ByteLevel(add_prefix_space=False))
    gpt2.post_processor = processors.ByteLevel(trim_offsets=False)
    result["gpt2"] = changed(gpt2, with_old_merges)

    # Not all bytes have a token.
    for name, fuses in [("unknown", False), ("unknown_fused", True)]:
        tokenizer = learn(
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            alphabet=[],
            specials=("<unk>", "<|endoftext|>"),
            unk_token="<unk>",
            fuse_unk=fuses,
        )
        result[name] = changed(tokenizer, lambda file: None)

    llama3 = changed(learn(split("llama3")), with_whole_words)[0]
    llama3.add_special_tokens(["<|begin|>", "<|end|>"])
    begin, end = (llama3.token_to_id(name) for name in ["<|begin|>", "<|end|>"])
    llama3.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A <|end|>",
                pair="<|begin|> $A <|begin|> $B",
                special_tokens=[("<|begin|>", begin), ("<|end|>", end)],
            ),
        ]
    )
    result["llama3"] = changed(llama3, lambda file: None)

    qwen2 = learn(split("qwen2"), normalizer=normalizers.NFC())
    qwen2.add_tokens(
        [
            AddedToken("<|x|>", normalized=False),
            AddedToken("<|xy|>", normalized=False),
            AddedToken("<|x|>y", normalized=False),
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
            AddedToken("wo\u0308rd", normalized=True),
        ]
    )
    result["qwen2"] = changed(qwen2, lambda file: None)
    result["qwen35"] = changed(learn(split("qwen35")), lambda file: None)
    result["o200k"] = changed(learn(split("o200k", "removed", invert=True)), lambda file: None)
    tekken = learn(split("tekken"))
    tekken.add_tokens([AddedToken("<both>", lstrip=True, rstrip=True), AddedToken("word"), AddedToken("wor")])
    result["tekken"] = changed(tekken, lambda file: None)
    # A pattern and then ByteLevel's own, with a space before every piece.
    twice = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERNS["o200k"]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    result["twice"] = changed(learn(twice), lambda file: None)
    return result


def block_texts(first):
    """The characters of a block alone, and all of them among letters, numbers and spaces."""
    characters = [chr(code) for code in range(first, first + BLOCK) if not 0xD800 <= code < 0xE000]
    among = "".join(f"{c} a{c}b A{c}B1{c}2 {c}{c}s\n" for c in characters) if first >> 16 in FULL_PLANES else ""
    return characters, among


def ids(tokenizer, texts):
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def blocks(tokenizer):
    found = []
    for first in range(0, 0x110000, BLOCK):
        alone, among = block_texts(first)
        found.append(checksum(ids(tokenizer, [*alone, among])))
    return found


def mark_texts():
    """Every character before and after a mark that it may change places with."""
    codes = [code for code in range(0x300, 0x20000) if not 0xD800 <= code < 0xE000]
    return [f"q{chr(code)}\u0334q\u0345{chr(code)}\u0301" for code in codes]


def main():
    randoms = random_texts(400)
    goldens = {
        "package": f"tokenizers {tokenizers.__version__}",
        "sentences": SENTENCES,
        "randoms": randoms,
        "repeats": REPEATS,
        "tokenizers": {},
    }
    for name, (tokenizer, text) in build().items():
        (HERE / f"{name}.json").write_text(text + "\n")
        goldens["tokenizers"][name] = {
            "vocabulary": tokenizer.get_vocab_size(),
            "sentences": ids(tokenizer, SENTENCES),
            "marked": tokenizer.encode("Hello world").ids,
            "randoms": [checksum([found]) for found in ids(tokenizer, randoms)],
            "repeats": [checksum([tokenizer.encode(part * times, add_special_tokens=False).ids]) for part, times in REPEATS],
            "blocks": blocks(tokenizer),
        }
    normalizing = Tokenizer.from_file(str(HERE / "qwen2.json"))
    goldens["marks"] = checksum(ids(normalizing, mark_texts()))
    (HERE / "goldens.json").write_text(json.dumps(goldens, ensure_ascii=False) + "\n")
    print(f"{len(goldens['tokenizers'])} tokenizers, {len(SENTENCES) + len(randoms)} texts")


if __name__ == "__main__":
    main()
