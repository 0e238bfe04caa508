"""The program as users call it."""
import hashlib
import os
import stat
import subprocess

import pytest
import slidedp_data
from samples import chat
from safetensors import safe_open
from safetensors.numpy import load_file

GOOD = chat("hi", "hello")


@pytest.fixture
def call(make_tokenizer, write_lines, tmp_path):
    """Runs slidedp-data on lines; returns exit code and output path."""
    folder, tokenizer = make_tokenizer("plain")

    def run(entries, *options, seq=128, tokenizer_dir=folder, out=tmp_path / "packed.safetensors"):
        path = entries if isinstance(entries, os.PathLike) else write_lines(entries)
        return slidedp_data.main(["--tokenizer", str(tokenizer_dir), "--input", str(path), "--seq", str(seq), "--out", str(out),
                                  *options]), out
    run.tokenizer, run.folder = tokenizer, folder
    return run


def test_writes_tensors_and_metadata(call, capsys):
    code, out = call([GOOD, "", chat("a", "b"), {"text": "plain text"}])
    assert code == 0, capsys.readouterr().err
    tensors = load_file(out)
    assert sorted(tensors) == ["input_ids", "labels", "position_ids"]
    assert all(t.shape == (1, 128) and t.dtype == "int32" for t in tensors.values())
    with safe_open(out, "np") as file:
        metadata = file.metadata()
    digest = hashlib.sha256((call.folder / "tokenizer.json").read_bytes()).hexdigest()
    assert metadata == {"format": "slidedp.packed", "version": "1", "seq": "128",
                        "vocabulary_size": str(len(call.tokenizer)), "tokenizer_hash": "sha256:" + digest}
    assert tensors["input_ids"].max() < len(call.tokenizer)
    assert "3 documents in 1 rows of 128 tokens" in capsys.readouterr().out
    assert sorted(f.name for f in out.parent.iterdir()) == ["chat.jsonl", "packed.safetensors", "tokenizer-plain"]


def test_same_input_same_tensors(call):
    entries = [chat(f"q{i}", "a" * i) for i in range(1, 30)]
    first = load_file(call(entries)[1])
    again = load_file(call(entries, "--overwrite")[1])
    assert all((first[name] == again[name]).all() for name in first) and len(first["labels"]) > 1


def test_output_has_the_usual_permissions(call):
    old = os.umask(0o027)
    try:
        _, out = call([GOOD])
    finally:
        os.umask(old)
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_existing_output_is_kept_unless_told(call, capsys):
    _, out = call([GOOD])
    before = out.read_bytes()
    code, _ = call([chat("other", "words")])
    assert code == 1 and out.read_bytes() == before
    assert "--overwrite" in capsys.readouterr().err
    assert call([chat("other", "words")], "--overwrite")[0] == 0 and out.read_bytes() != before


@pytest.mark.parametrize("entries, message", [
    ([GOOD, "{not json"], "chat.jsonl:2: the line is not JSON"),
    ([GOOD, "", {"txt": "x"}], "chat.jsonl:3: the line is not an object with either"),
    ([{"messages": [{"role": "alien", "content": "x"}]}], "chat.jsonl:1: the line is rejected by the tokenizer's chat template"),
    ([], "chat.jsonl holds no documents"),
    (["", "  "], "chat.jsonl holds no documents"),
])
def test_bad_lines_are_named(call, capsys, entries, message):
    code, out = call(entries)
    errors = capsys.readouterr().err
    assert code == 1 and message in errors
    assert errors.startswith("slidedp-data: error: ") and errors.count("\n") == 1
    assert not out.exists()


def test_input_that_is_not_text(call, capsys, tmp_path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b'{"text": "\xff\xfe"}\n')
    assert call(path)[0] == 1
    assert "binary.jsonl cannot be read: it is not UTF-8 text" in capsys.readouterr().err


def test_missing_files_are_named(call, capsys, tmp_path):
    assert call(tmp_path / "nowhere.jsonl")[0] == 1
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err
    assert call([GOOD], tokenizer_dir=tmp_path / "nomodel")[0] == 1
    assert "nomodel does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert call([GOOD], tokenizer_dir=tmp_path / "empty")[0] == 1
    assert "empty holds no tokenizer" in capsys.readouterr().err
    assert call([GOOD], out=tmp_path / "no" / "such" / "x.safetensors")[0] == 1
    assert "output's directory" in capsys.readouterr().err


def test_broken_tokenizer_is_named(call, capsys, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    assert call([GOOD], tokenizer_dir=tmp_path / "broken")[0] == 1
    errors = capsys.readouterr().err
    assert "broken cannot be loaded" in errors and errors.count("slidedp-data: error") == 1


def test_long_documents(call, capsys):
    entries = [GOOD, chat("question " * 20, "answer"), chat("hi", "answer " * 30)]
    code, out = call(entries)
    assert code == 1 and not out.exists()
    errors = capsys.readouterr().err
    assert "chat.jsonl:2: the document has" in errors and "more than --seq 128" in errors

    assert call(entries, "--long", "drop")[0] == 0
    assert "too long, dropped: 2 (lines 2, 3)" in capsys.readouterr().out
    # Cut after 128 tokens, line 2 has no target left.
    assert call(entries, "--long", "truncate", "--overwrite")[0] == 0
    shown = capsys.readouterr().out
    assert "dropped: 1 (line 2)" in shown and "truncated: 1 (line 3)" in shown
    assert (load_file(out)["position_ids"] == 127).any()


def test_nothing_left_after_dropping(call, capsys):
    assert call([GOOD], "--long", "drop", seq=4)[0] == 1
    assert "no documents of at most 4 tokens" in capsys.readouterr().err


def test_failed_write_leaves_nothing(call, capsys, monkeypatch, tmp_path):
    import safetensors.numpy

    def full_disk(tensors, path, metadata=None):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    code, out = call([GOOD])
    assert code == 1 and "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.glob("packed.safetensors*"))


def test_wrong_command_line_is_exit_code_2(call):
    with pytest.raises(SystemExit) as stop:
        call([GOOD], seq=1)
    assert stop.value.code == 2


@pytest.mark.skipif("SLIDEDP_BUILD_DIR" not in os.environ, reason="needs the build folder: run through ctest")
def test_built_program_runs(call, write_lines, tmp_path):
    program = os.path.join(os.environ["SLIDEDP_BUILD_DIR"], "slidedp-data")
    out = tmp_path / "built.safetensors"
    result = subprocess.run([program, "--tokenizer", call.folder, "--input", write_lines([GOOD]), "--seq", "64", "--out", out],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert load_file(out)["labels"].shape == (1, 64)
