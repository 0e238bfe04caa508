#!/usr/bin/env python3
"""slidedp-data: turns chat or text documents into the packed token file that slidedp-run trains on.

Input: JSON lines, each {"messages": [{"role": ..., "content": ...}, ...]} (rendered by the tokenizer's own chat
template) or {"text": ...} (loss on all its tokens, end-of-text token appended). Output: see runtime/io/FORMATS.md.
"""
import argparse
import bisect
import hashlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

IGNORED = -100
# Rows that packing still offers documents to. A bound keeps packing linear; with this many open rows a closed one has
# room for a few tokens only.
OPEN_ROWS = 4096
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("spiece.model",), ("vocab.json", "merges.txt"))


class DataError(Exception):
    """Bad input; the message is one sentence for the user."""


@dataclass
class Document:
    ids: np.ndarray  # int32
    targets: np.ndarray  # bool, same length: the loss is taken here

    def labels(self):
        return np.where(self.targets, self.ids, IGNORED).astype(np.int32)


@dataclass
class Packed:
    input_ids: np.ndarray  # int32 [rows, seq], as the other two
    labels: np.ndarray
    position_ids: np.ndarray


@dataclass
class Summary:
    documents: int = 0
    dropped: list = field(default_factory=list)  # line numbers
    truncated: list = field(default_factory=list)


def tokenizer_hash(folder):
    """Identifies the tokenizer: SHA-256 of the file (or files) that define its vocabulary."""
    for names in TOKENIZER_FILES:
        if all((folder / name).is_file() for name in names):
            digest = hashlib.sha256()
            for name in names:
                digest.update((folder / name).read_bytes())
            return "sha256:" + digest.hexdigest()
    raise DataError(f"{folder} holds no tokenizer (none of tokenizer.json, tokenizer.model, spiece.model, vocab.json "
                    "with merges.txt); give the model's directory.")


def load_tokenizer(folder):
    if not folder.is_dir():
        raise DataError(f"The tokenizer directory {folder} does not exist.")
    tokenizer_hash(folder)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many types; all mean that the files are unusable
        raise DataError(f"The tokenizer in {folder} cannot be loaded: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise DataError(f"The tokenizer in {folder} has no fast version, which is needed to find the assistant's tokens; "
                        "save it once with transformers' AutoTokenizer(...).save_pretrained().")
    return tokenizer


def one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


class Encoder:
    """Makes documents of input lines with one tokenizer."""

    def __init__(self, tokenizer, train_on):
        self.tokenizer = tokenizer
        self.train_on = train_on
        template = tokenizer.chat_template or ""
        self.template_marks_assistant = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(template)))
        self.special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def encode(self, entry):
        """entry: one parsed input line. Raises DataError without the place."""
        if not isinstance(entry, dict) or ("messages" in entry) == ("text" in entry):
            raise DataError('is not an object with either "messages" or "text".')
        document = self._chat(entry["messages"]) if "messages" in entry else self._text(entry["text"])
        document.targets[:1] = False  # nothing precedes a document's first token
        if not document.targets.any():
            raise DataError("has no token to train on" +
                            (" (no assistant message)." if "messages" in entry and self.train_on == "assistant" else "."))
        return document

    def _text(self, text):
        if not isinstance(text, str) or not text:
            raise DataError('has a "text" that is not a non-empty string.')
        if self.tokenizer.eos_token_id is None:
            raise DataError('has a "text", but the tokenizer has no end-of-text token to end it with.')
        ids = self.tokenizer(text)["input_ids"]
        if ids[-1:] != [self.tokenizer.eos_token_id]:
            ids = ids + [self.tokenizer.eos_token_id]
        return Document(np.array(ids, np.int32), np.ones(len(ids), bool))

    def _chat(self, messages):
        check_messages(messages)
        if not self.tokenizer.chat_template:
            raise DataError('has "messages", but the tokenizer has no chat template; use {"text": ...} lines.')
        if self.train_on == "assistant" and self.template_marks_assistant:
            out = self._template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return Document(np.array(out["input_ids"], np.int32), np.array(out["assistant_masks"], bool))
        full = self._render(messages)
        out = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(out["input_ids"], np.int32)
        if self.train_on == "all":
            return Document(ids, np.ones(len(ids), bool))
        targets = np.zeros(len(ids), bool)
        offsets = np.array(out["offset_mapping"]).reshape(-1, 2)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._turn(messages, index, full)
                inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
                targets |= self._without_tail(ids, inside)
        return Document(ids, targets)

    def _turn(self, messages, index, full):
        """Where in the rendered conversation the assistant's turn `index` stands: what the model must write after the
        generation prompt, up to the turn's end."""
        before = self._render(messages[:index], add_generation_prompt=True) if index else ""
        upto = self._render(messages[:index + 1])
        if full.startswith(before) and full.startswith(upto) and upto.startswith(before):
            return len(before), len(upto)
        # Some templates render the last turn in another way (an empty block of thoughts, for example). Then the turn is
        # its content right after the generation prompt, ended as the last turn is ended.
        content = (messages[index].get("content") or "").strip()
        if content and content in upto:
            turn = content + upto[upto.rindex(content) + len(content):]
            if full.startswith(before + turn):
                return len(before), len(before) + len(turn)
        raise DataError(f"has an assistant turn (message {index + 1}) that the chat template renders differently in the whole "
                        "conversation than after its prompt, so its tokens cannot be told; end the conversation there or "
                        "use --train-on all.")

    def _without_tail(self, ids, inside):
        """Drops what the template writes after the end-of-turn token (a newline, usually): generation stops before it."""
        where = np.flatnonzero(inside)
        last = next((k for k in reversed(range(len(where))) if int(ids[where[k]]) in self.special_ids), None)
        if last is not None:
            inside[where[last + 1:]] = False
        return inside

    def _render(self, messages, **options):
        return self._template(messages, tokenize=False, **options)

    def _template(self, messages, **options):
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # Jinja's own and whatever the template raises
            raise DataError(f"is rejected by the tokenizer's chat template: {one_line(error)}") from error


def check_messages(messages):
    if not isinstance(messages, list) or not messages:
        raise DataError('has "messages" that are not a non-empty list.')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'has a message ({index + 1}) without a "role".')
        if not isinstance(message.get("content"), (str, list, type(None))) or "content" not in message:
            raise DataError(f'has a message ({index + 1}) without a "content" string.')


def read_documents(path, encoder, seq, long, summary):
    """Documents of at most seq tokens, in file order; the line is named in every error."""
    documents = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    document = read_line(f"{path}:{number}", number, line, encoder, seq, long, summary)
                    documents += [document] if document else []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"The input {path} cannot be read: {reason}.") from error
    if not documents:
        raise DataError(f"The input {path} holds no documents" +
                        (f" of at most {seq} tokens." if summary.dropped else "."))
    return documents


def read_line(place, number, line, encoder, seq, long, summary):
    try:
        document = encoder.encode(json.loads(line))
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: the line is not JSON ({error.msg} at column {error.colno}).") from error
    except DataError as error:
        raise DataError(f"{place}: the line {error}") from error
    summary.documents += 1
    if len(document.ids) <= seq:
        return document
    if long == "error":
        raise DataError(f"{place}: the document has {len(document.ids)} tokens, more than --seq {seq}; "
                        "raise --seq or choose --long drop or --long truncate.")
    cut = Document(document.ids[:seq], document.targets[:seq])
    if long == "drop" or not cut.targets.any():
        summary.dropped.append(number)
        return None
    summary.truncated.append(number)
    return cut


def assign_rows(lengths, seq):
    """Best fit in input order: each document goes to the row with the least free space that still holds it (of equal
    ones the earliest). Returns the documents of each row."""
    rows = []
    open_rows = []  # sorted (free tokens, row)
    for document, length in enumerate(lengths):
        at = bisect.bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
            rows[row].append(document)
        else:
            free, row = seq, len(rows)
            rows.append([document])
        if free > length:
            bisect.insort(open_rows, (free - length, row))
        if len(open_rows) > OPEN_ROWS:
            del open_rows[0]
    return rows


def pack(documents, seq, pad_id):
    rows = assign_rows([len(d.ids) for d in documents], seq)
    shape = (len(rows), seq)
    packed = Packed(np.full(shape, pad_id, np.int32), np.full(shape, IGNORED, np.int32), np.zeros(shape, np.int32))
    for row, members in enumerate(rows):
        at = 0
        for document in (documents[m] for m in members):
            end = at + len(document.ids)
            packed.input_ids[row, at:end] = document.ids
            packed.labels[row, at:end] = document.labels()
            packed.position_ids[row, at:end] = np.arange(end - at)
            at = end
        packed.position_ids[row, at:] = np.arange(seq - at)  # padding is a document of its own
    return packed


def write(path, packed, metadata):
    """Writes the file whole or not at all."""
    from safetensors.numpy import save_file

    tensors = {name: getattr(packed, name) for name in ("input_ids", "labels", "position_ids")}
    part = None
    try:
        handle, part = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
        os.close(handle)
        save_file(tensors, part, metadata=metadata)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)
        os.replace(part, path)
    except Exception as error:  # OSError, or safetensors' own error around one
        raise DataError(f"The output {path} cannot be written: {one_line(error)}") from error
    finally:
        if part and os.path.exists(part):
            os.unlink(part)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="slidedp-data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="directory of the model or tokenizer")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--seq", type=int, required=True, metavar="N", help="tokens per row")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="packed.safetensors to write")
    parser.add_argument("--train-on", choices=("assistant", "all"), default="assistant",
                        help="chat: tokens that the loss is taken on (text documents: always all)")
    parser.add_argument("--long", choices=("error", "drop", "truncate"), default="error",
                        help="what to do with a document longer than --seq")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    options = parser.parse_args(arguments)
    if options.seq < 2:
        parser.error("--seq must be at least 2")
    return options


def lines_of(numbers):
    shown = ", ".join(map(str, numbers[:5]))
    return f"{len(numbers)} (line{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 5 else ''})"


def run(options):
    if options.out.exists() and not options.overwrite:
        raise DataError(f"The output {options.out} exists already; choose another or give --overwrite.")
    if not options.input.is_file():
        raise DataError(f"The input {options.input} does not exist or is not a file.")
    if not options.out.parent.is_dir():
        raise DataError(f"The output's directory {options.out.parent} does not exist.")
    tokenizer = load_tokenizer(options.tokenizer)
    summary = Summary()
    encoder = Encoder(tokenizer, options.train_on)
    documents = read_documents(options.input, encoder, options.seq, options.long, summary)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    packed = pack(documents, options.seq, pad)
    write(options.out, packed, {
        "format": "slidedp.packed", "version": "1", "seq": str(options.seq), "vocabulary_size": str(len(tokenizer)),
        "tokenizer_hash": tokenizer_hash(options.tokenizer)})
    tokens = sum(len(d.ids) for d in documents)
    targets = int((packed.labels != IGNORED).sum())
    print(f"{options.out}: {len(documents)} documents in {len(packed.labels)} rows of {options.seq} tokens, {tokens} tokens "
          f"({100 * tokens / packed.labels.size:.1f} % of the rows), {targets} of them targets")
    for what, numbers in (("dropped", summary.dropped), ("truncated", summary.truncated)):
        if numbers:
            print(f"  too long, {what}: {lines_of(numbers)}")


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        run(options)
    except DataError as error:
        print(f"slidedp-data: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slidedp-data: interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
