#!/usr/bin/env python3
"""Makes a token file for Tessera's trainer with any tokenizer of Hugging Face.

    make_token_file.py TOKENIZER OUT.tokens FILE...

TOKENIZER is a tokenizer.json, or a folder of a model that has one. Each FILE is a text, or
JSON lines (.jsonl, also .gz) with a text in each line. Each text is one document, followed
by the end-of-text token. The format is in docs/formats/token-file.md.

Needs the package tokenizers (pip install tokenizers); for a folder without tokenizer.json
also transformers. Documents are read, encoded and written one batch after another, so that
files may be larger than memory. Under OUT.tokens there is a whole file or none.
"""

import argparse
import array
import gzip
import json
import os
import pathlib
import struct
import sys
import time

MAGIC = b"TESSTOK1"
HEADER = struct.Struct("<8sIIQ")  # magic, bytes per token, vocabulary, number of tokens
BATCH_CHARACTERS = 4_000_000
LONGEST_DOCUMENT = 64_000_000  # characters; longer texts are encoded in parts


class TokenFileError(RuntimeError):
    """Something that the user gave cannot be used."""


class TokenFile:
    """A token file that is written; it gets its name when all is in it."""

    def __init__(self, path, vocabulary):
        if not 1 <= vocabulary <= 2**31:
            raise TokenFileError(f"a vocabulary of {vocabulary} tokens: it must have 1 to 2^31")
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.vocabulary, self.size = vocabulary, 0
        self.code = "H" if vocabulary <= 65536 else "I"
        self.file = open(self.partial, "wb")
        self._write_header()

    def _write_header(self):
        self.file.write(HEADER.pack(MAGIC, 2 if self.code == "H" else 4, self.vocabulary, self.size))

    def append(self, ids):
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise TokenFileError(f"token {max(ids)} is not below the vocabulary, {self.vocabulary}")
        tokens = array.array(self.code, ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        self.file.write(tokens.tobytes())
        self.size += len(ids)

    def finish(self):
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.partial, self.path)

    def discard(self):
        self.file.close()
        self.partial.unlink(missing_ok=True)


class Tokenizer:
    """Token numbers of texts, with no special tokens but the one at the end."""

    def __init__(self, source, end_of_text):
        source = pathlib.Path(source)
        file = source / "tokenizer.json" if source.is_dir() else source
        if file.exists():
            import tokenizers

            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        elif source.is_dir():
            import transformers

            fast = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
            self.tokenizer = fast.backend_tokenizer
        else:
            raise TokenFileError(f"{source}: no such folder or tokenizer.json. Nothing is downloaded")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1
        name = end_of_text if end_of_text is not None else _end_of_text_of(source)
        if name and name not in ids:
            raise TokenFileError(f"the tokenizer has no token {name!r} for the end of a text")
        self.end = [ids[name]] if name else []
        self.end_name = name

    def encode(self, texts):
        for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids


def _end_of_text_of(source):
    """eos_token of tokenizer_config.json, which is a string or an object."""
    file = (source if source.is_dir() else source.parent) / "tokenizer_config.json"
    token = json.loads(file.read_text()).get("eos_token") if file.exists() else None
    return token["content"] if isinstance(token, dict) else token


class Progress:
    """A line on a terminal that says how far it is; without one, a line now and then."""

    def __init__(self, total_bytes):
        self.total, self.began, self.next = max(total_bytes, 1), time.monotonic(), 0.0
        self.pause = 0.5 if sys.stderr.isatty() else 30.0
        self.end = "\r" if sys.stderr.isatty() else "\n"

    def show(self, done_bytes, tokens, last=False):
        seconds = time.monotonic() - self.began
        if seconds >= self.next or last:
            self.next = seconds + self.pause
            print(f"{100 * done_bytes // self.total:3}%  {tokens:,} tokens  {tokens / max(seconds, 1e-9):,.0f} tokens/s   ",
                  end="\n" if last else self.end, file=sys.stderr, flush=True)


def documents(path, field, moved):
    """Texts of a file, in parts where they are long: each part with whether a document ends
    with it. `moved` is called with the number of bytes read since."""
    with open(path, "rb") as raw:
        plain = gzip.open(raw) if path.suffix == ".gz" else raw
        position = 0

        def tell():
            nonlocal position
            now = raw.tell()
            moved(now - position)
            position = now

        if ".jsonl" in path.suffixes:
            for number, line in enumerate(plain, 1):
                if line.strip():
                    yield _text_of(path, number, line, field), True
                    tell()
            return
        part = plain.read(LONGEST_DOCUMENT)
        while following := plain.read(LONGEST_DOCUMENT):
            part, rest = _cut_at_line(part)
            yield _decoded(path, part), False
            tell()
            part = rest + following
        if part:
            yield _decoded(path, part), True
        tell()


def _cut_at_line(block):
    """Two parts, the first one whole lines where there are lines."""
    cut = block.rfind(b"\n") + 1
    if cut == 0:  # then whole characters: the last one may go on in the next block
        cut = len(block) - 1
        while cut > 0 and block[cut] & 0xC0 == 0x80:
            cut -= 1
    return block[:cut], block[cut:]


def _decoded(path, block):
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise TokenFileError(f"{path} is not UTF-8: {error}") from error


def _text_of(path, number, line, field):
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenFileError(f"{path}, line {number}: no JSON object with {field!r} ({type(error).__name__}: {error}); "
                             "--field names another") from error
    if not isinstance(text, str):
        raise TokenFileError(f"{path}, line {number}: {field!r} is not a text")
    return text


def make(tokenizer, out, paths, field="text", vocabulary=None):
    """Writes the file; returns the numbers of documents and tokens."""
    progress = Progress(sum(path.stat().st_size for path in paths))
    file = TokenFile(out, vocabulary or tokenizer.vocabulary)
    try:
        count = done = 0

        def moved(num_bytes):
            nonlocal done
            done += num_bytes

        def flush(batch):
            for ids, (_, is_last) in zip(tokenizer.encode([text for text, _ in batch]), batch):
                file.append(ids + tokenizer.end if is_last else ids)
            progress.show(done, file.size)

        batch, characters = [], 0
        for path in paths:
            for text, is_last in documents(path, field, moved):
                batch.append((text, is_last))
                characters += len(text)
                count += is_last
                if characters >= BATCH_CHARACTERS:
                    flush(batch)
                    batch, characters = [], 0
        flush(batch)
        if file.size == 0:
            raise TokenFileError("the files have no text")
        file.finish()
        progress.show(done, file.size, last=True)
        return count, file.size
    except BaseException:
        file.discard()
        raise


def main():
    parser = argparse.ArgumentParser(description="Makes a token file with a tokenizer of Hugging Face.")
    parser.add_argument("tokenizer", help="tokenizer.json, or a folder with one")
    parser.add_argument("out", type=pathlib.Path, help="token file to write")
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="texts (UTF-8) or .jsonl, also .jsonl.gz")
    parser.add_argument("--field", default="text", help="of JSON lines (default: %(default)s)")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="after each document (default: eos_token of "
                        "tokenizer_config.json; '' for none)")
    parser.add_argument("--vocabulary", type=int, help="vocab_size of the model, if it is more than the tokenizer's")
    options = parser.parse_args()
    try:
        tokenizer = Tokenizer(options.tokenizer, options.end_of_text)
        if options.vocabulary is not None and options.vocabulary < tokenizer.vocabulary:
            raise TokenFileError(f"--vocabulary {options.vocabulary}: the tokenizer has {tokenizer.vocabulary} tokens")
        count, size = make(tokenizer, options.out, options.files, options.field, options.vocabulary)
    except (TokenFileError, OSError, ImportError) as error:
        sys.exit(f"make_token_file: {error}")
    end = f"{tokenizer.end_name!r} after each" if tokenizer.end else "no token between them"
    print(f"{options.out}: {size:,} tokens of {options.vocabulary or tokenizer.vocabulary:,}, from {count:,} documents with {end}")


if __name__ == "__main__":
    main()
