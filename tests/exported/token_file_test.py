#!/usr/bin/env python3
"""Tests of python/make_token_file.py, with the tokenizers of Hugging Face.

    token_file_test.py RESULTS.xml [CASE[.TEST]...]
"""

import gzip
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "python"), str(HERE.parent / "report"), str(HERE)]

import which_python

which_python.with_transformers("exported_token_file_test")

import junit
import make_token_file
import tokenizers

SCRIPT = HERE.parents[1] / "python" / "make_token_file.py"
TEXTS = ["The quick brown fox jumps over the lazy dog.\n\nTwice.", "Grüße aus Köln: 12 €", "def f(x):\n    return x\n"]


class TokenFileCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "train.tokens"
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(TEXTS * 3, vocab_size=300, special_tokens=["<end>"])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, self.folder, self.out, *arguments], capture_output=True, text=True)

    def text(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def lines(self, name, texts, opener=open):
        path = self.folder / name
        with opener(path, "wt") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
        return path

    def read(self):
        """As docs/formats/token-file.md says."""
        raw = self.out.read_bytes()
        magic, width, vocabulary, size = struct.unpack("<8sIIQ", raw[:24])
        self.assertEqual(magic, b"TESSTOK1")
        self.assertEqual(len(raw), 24 + width * size)
        return vocabulary, width, list(struct.unpack(f"<{size}{'H' if width == 2 else 'I'}", raw[24:]))

    def wanted(self, texts):
        end = self.tokenizer.token_to_id("<end>")
        return [i for text in texts for i in self.tokenizer.encode(text, add_special_tokens=False).ids + [end]]

    def refused(self, words, *arguments):
        result = self.run_script(*arguments)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(words, result.stderr)
        self.assertEqual([path.name for path in self.folder.glob("train.tokens*")], [])


class Makes(TokenFileCase):
    def test_tokens_of_texts_and_of_json_lines(self):
        files = [self.text("a.txt", TEXTS[0]), self.lines("b.jsonl", TEXTS[1:]),
                 self.lines("c.jsonl.gz", TEXTS[:1], gzip.open)]
        result = self.run_script(*files)
        self.assertEqual(result.returncode, 0, result.stderr)
        vocabulary, width, tokens = self.read()
        self.assertEqual(tokens, self.wanted([*TEXTS, TEXTS[0]]))
        self.assertEqual((vocabulary, width), (max(self.tokenizer.get_vocab().values()) + 1, 2))
        self.assertIn("4 documents with '<end>' after each", result.stdout)
        self.assertIn("100%", result.stderr)

    def test_the_worked_example_of_the_format(self):
        file = make_token_file.TokenFile(self.out, 300)
        file.append([1, 2])
        file.append([299])
        file.finish()
        self.assertEqual(self.out.read_bytes().hex(" "), "54 45 53 53 54 4f 4b 31 02 00 00 00 2c 01 00 00 "
                         "03 00 00 00 00 00 00 00 01 00 02 00 2b 01")

    def test_wide_tokens_for_a_larger_vocabulary(self):
        self.assertEqual(self.run_script(self.text("a.txt", TEXTS[0]), "--vocabulary", "70000").returncode, 0)
        self.assertEqual(self.read(), (70000, 4, self.wanted(TEXTS[:1])))

    def test_many_batches_give_the_same(self):
        make_token_file.BATCH_CHARACTERS, before = 10, make_token_file.BATCH_CHARACTERS
        try:
            tokenizer = make_token_file.Tokenizer(self.folder, None)
            make_token_file.make(tokenizer, self.out, [self.lines("b.jsonl", TEXTS * 5)])
        finally:
            make_token_file.BATCH_CHARACTERS = before
        self.assertEqual(self.read()[2], self.wanted(TEXTS * 5))

    def test_a_text_that_is_too_long_is_cut_at_lines(self):
        make_token_file.LONGEST_DOCUMENT, before = 7, make_token_file.LONGEST_DOCUMENT
        try:
            parts = list(make_token_file.documents(self.text("a.txt", "ab\ncdefgh€€€€ij\nk"), "text", lambda n: None))
        finally:
            make_token_file.LONGEST_DOCUMENT = before
        self.assertEqual("".join(text for text, _ in parts), "ab\ncdefgh€€€€ij\nk")
        self.assertEqual(parts[0], ("ab\n", False))
        self.assertEqual([is_last for _, is_last in parts], [False] * (len(parts) - 1) + [True])


class Refuses(TokenFileCase):
    def test_what_it_cannot_read(self):
        self.refused("line 1: no JSON object with 'text'", self.text("b.jsonl", '{"body": "x"}\n'))
        self.refused("is not UTF-8", self.binary("a.txt", b"\xff\xfe"))
        self.refused("No such file", self.folder / "absent.txt")
        self.refused("the files have no text", self.text("empty.txt", ""))

    def test_a_vocabulary_that_is_too_small(self):
        self.refused("the tokenizer has", self.text("a.txt", "x"), "--vocabulary", "5")

    def test_a_token_that_there_is_not(self):
        self.refused("no token '<eos>'", self.text("a.txt", "x"), "--end-of-text", "<eos>")

    def binary(self, name, data):
        path = self.folder / name
        path.write_bytes(data)
        return path


def main(results, names):
    loader = unittest.defaultTestLoader
    here = sys.modules[__name__]
    tests = loader.loadTestsFromNames(names, here) if names else loader.loadTestsFromModule(here)
    return not junit.run(tests, pathlib.Path(results), "exported_token_file_test", "TokenFileTest")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
