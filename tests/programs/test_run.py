"""slidedp-plan and slidedp-run as a user starts them: exit codes, one line for an error, signals."""

import os
import pathlib
import re
import shutil
import signal
import sqlite3
import subprocess
import time

import pytest
import safetensors.torch

import reference

ROOT = pathlib.Path(__file__).parent.parent.parent
BUILD = pathlib.Path(os.environ["SLIDEDP_BUILD_DIR"])
TRAIN = """schema: slidedp.train/1
seq: {seq}
batch_rows: {rows}
steps: 3
adam: {{learning_rate: 0.001, beta1: 0.9, beta2: 0.999, eps: 1.0e-08, weight_decay: 0}}
max_grad_norm: 1
"""


def call(program, *arguments):
    return subprocess.run([BUILD / program, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def make_plan(folder, *arguments, train=None):
    (folder / "train.yaml").write_text(train or TRAIN.format(seq=reference.SEQ, rows=reference.ROWS))
    return call("slidedp-plan", "--model", folder / "model", "--hardware", ROOT / "configs/hardware/cpu-2rank.yaml",
                "--train", folder / "train.yaml", "--out", folder / "plan.yaml", "--pin", "ranks=2", *arguments)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    reference.tiny_checkpoint("llama", folder / "model")
    reference.packed_rows(131, str(folder / "packed.safetensors"))
    done = make_plan(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def work(origin, tmp_path):
    shutil.copytree(origin, tmp_path / "work")
    return tmp_path / "work"


def run_arguments(work, *arguments):
    return ["--plan", work / "plan.yaml", "--model", work / "model", "--data", work / "packed.safetensors", "--out",
            work / "run", *arguments]


def run(work, *arguments):
    return call("slidedp-run", *run_arguments(work, *arguments))


def status(work):
    with sqlite3.connect(work / "run" / "run.db") as connection:
        return connection.execute("SELECT status, error FROM runs").fetchone()


def assert_refused(done, *words, code=1):
    """One line on stderr that says `words`."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.strip().split("\n")
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_trains_exports_and_logs(work):
    done = run(work)
    assert done.returncode == 0, done.stderr
    assert status(work) == ("ok", None)
    with sqlite3.connect(work / "run" / "run.db") as connection:
        assert connection.execute("SELECT count(*) FROM steps").fetchone() == (3,)
        sources = connection.execute("SELECT source, count(DISTINCT step) FROM tasks GROUP BY source").fetchall()
    assert dict(sources)["measured"] == 3 and dict(sources)["predicted"] == 1
    exported = reference.load(work / "run" / "hf")
    source = reference.load(work / "model")
    assert any(not a.equal(b) for a, b in zip(exported.parameters(), source.parameters()))
    assert_refused(run(work), "run", "--overwrite")


def test_the_order_of_updates_changes_no_bit(work):
    assert run(work).returncode == 0
    expected = (work / "run" / "hf" / "model.safetensors").read_bytes()
    done = run(work, "--overwrite", "--update-order", "arrival")
    assert done.returncode == 0, done.stderr
    assert (work / "run" / "hf" / "model.safetensors").read_bytes() == expected
    unknown = run(work, "--overwrite", "--update-order", "random")
    assert unknown.returncode == 2 and "random" in unknown.stderr


def run_plans(work, plans, *arguments):
    names = ",".join(str(work / plan) for plan in plans)
    return call("slidedp-run", "--plans", names, *run_arguments(work, *arguments)[2:])


# The second plan differs in what must not change a bit.
def other_plan(work, **changes):
    text = (work / "plan.yaml").read_text()
    for key, value in {"chunk_elements": 640, "layer_slots": 3, "update": "split", **changes}.items():
        text, found = re.subn(rf"^( *{key}): .*$", rf"\g<1>: {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    (work / "other.yaml").write_text(text)


def test_plans_one_after_another_train_as_one_plan_does(work):
    other_plan(work)
    assert "update: split" not in (work / "plan.yaml").read_text()
    assert run(work, "--steps", 6).returncode == 0
    alone = (work / "run" / "hf" / "model.safetensors").read_bytes()
    done = run_plans(work, ["plan.yaml", "other.yaml", "plan.yaml"], "--steps", 2, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert (work / "run" / "hf" / "model.safetensors").read_bytes() == alone
    results = {path.name for path in (work / "run").iterdir() if path.suffix in (".db", ".md")}
    assert results == {f"{stem}-{number}.{suffix}" for stem, suffix in (("run", "db"), ("report", "md"))
                       for number in (1, 2, 3)}
    for number in (1, 2, 3):
        with sqlite3.connect(work / "run" / f"run-{number}.db") as connection:
            assert connection.execute("SELECT status, error FROM runs").fetchall() == [("ok", None)]
            steps = connection.execute("SELECT step FROM steps ORDER BY step").fetchall()
            assert steps == [(2 * number - 2,), (2 * number - 1,)]


def test_plans_that_do_not_belong_together_are_refused(work):
    other_plan(work, learning_rate=0.002)
    assert_refused(run_plans(work, ["plan.yaml", "other.yaml"]), "other.yaml", "learning_rate: 0.002",
                   "learning_rate: 0.001", "--train")
    assert_refused(run_plans(work, ["plan.yaml", "none.yaml"]), "none.yaml")
    other_plan(work, chunk_elements=0)
    assert_refused(run_plans(work, ["plan.yaml", "other.yaml"]), "other.yaml", "chunk_elements")
    other_plan(work, model="llama-1x1-00000000")
    assert_refused(run_plans(work, ["plan.yaml", "other.yaml"]), "other.yaml", "llama-1x1-00000000")
    both = call("slidedp-run", "--plans", work / "plan.yaml", *run_arguments(work))
    assert both.returncode == 2 and "--plans" in both.stderr
    assert not (work / "run").exists()


# Prints one step a line; so many steps that only a signal ends it.
def start(work):
    command = [BUILD / "slidedp-run", *map(str, run_arguments(work, "--steps", 1000000))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 3/"):
            return process
    raise AssertionError(process.stderr.read())


def test_one_interrupt_finishes_the_step_and_exports_it(work):
    process = start(work)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (work / "run" / "hf" / "model.safetensors").exists()
    assert status(work)[0] == "interrupted"
    reference.load(work / "run" / "hf")


def test_a_second_interrupt_stops_at_once(work):
    process = start(work)
    process.send_signal(signal.SIGINT)
    time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    left = {path.name for path in (work / "run").iterdir()} - {"run.db", "run.db-wal", "run.db-shm", "report.md"}
    # Either the export was complete before the second signal came, or there is nothing of it.
    assert left <= {"hf"}
    if "hf" in left:
        reference.load(work / "run" / "hf")
    assert status(work)[0] == "interrupted"


def test_bad_input_is_one_line(work):
    usage = call("slidedp-run", *run_arguments(work)[2:])
    assert usage.returncode == 2 and "--plan or --plans is required" in usage.stderr
    (work / "plan.yaml").rename(work / "kept.yaml")
    assert_refused(run(work), "plan.yaml")
    text = (work / "kept.yaml").read_text()
    (work / "plan.yaml").write_text(text.replace("layer_slots:", "layer_slot:"))
    assert_refused(run(work), "plan.yaml:", "layer_slot", "layer_slots")
    (work / "plan.yaml").write_text(text)
    assert not (work / "run").exists()


def test_refuses_a_plan_for_another_model(work):
    shutil.rmtree(work / "model")
    reference.tiny_checkpoint("qwen2", work / "model")
    assert_refused(run(work), "model", "slidedp-plan")


def test_refuses_checkpoints_that_do_not_fit(work):
    file = work / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"

    def refused_with(changed, *words):
        safetensors.torch.save_file(changed, file, {"format": "pt"})
        assert_refused(run(work), name, *words)

    refused_with({k: v for k, v in tensors.items() if k != name})
    refused_with({**tensors, name: tensors[name][:-1].clone()}, "72", "71")
    refused_with({**tensors, name: tensors[name].long()}, "I64")
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:-10])
    assert_refused(run(work), "model.safetensors")
    assert not (work / "run").exists()


def test_refuses_data_that_do_not_fit(work):
    file = work / "packed.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = safetensors.torch.load_file(file)

    def refused_with(words, metadata=metadata, **changed):
        safetensors.torch.save_file({**tensors, **changed}, file, metadata)
        assert_refused(run(work), "packed.safetensors", *words)

    ids = tensors["input_ids"].clone()
    ids[2, 3] = 131
    refused_with(["131", "row 2"], input_ids=ids)
    wider = {k: v.repeat(1, 2).contiguous() for k, v in tensors.items()}
    refused_with([str(reference.SEQ)], {**metadata, "seq": str(2 * reference.SEQ)}, **wider)
    none = tensors["labels"].clone().fill_(-100)
    safetensors.torch.save_file({**tensors, "labels": none}, file, metadata)
    assert_refused(run(work), "no target token")
    assert not (work / "run").exists()


def test_planner_refuses_rows_longer_than_the_model(work):
    done = make_plan(work, train=TRAIN.format(seq=65, rows=4))
    assert_refused(done, "65", "64")


def test_nothing_fits_is_exit_code_3(work):
    done = make_plan(work, "--gpu-memory", "10KiB")
    assert_refused(done, "GPU", code=3)
