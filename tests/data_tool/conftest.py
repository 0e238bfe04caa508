import json
import sys
from pathlib import Path

import pytest
from samples import TEMPLATES, save_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runtime" / "data"))


@pytest.fixture
def make_tokenizer(tmp_path):
    def make(name="plain", **options):
        folder = tmp_path / f"tokenizer-{name}"
        return folder, save_tokenizer(folder, TEMPLATES.get(name), **options)
    return make


@pytest.fixture
def write_lines(tmp_path):
    def write(entries, name="chat.jsonl"):
        path = tmp_path / name
        path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
        return path
    return write
