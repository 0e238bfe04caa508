"""The comparison's whole way on a toy model and CPU ranks, with a stand-in for the peer: what it extracts and writes, not
how fast anything is."""
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["SLIDEDP_BUILD_DIR"])
COMPARE = ROOT / "tests/bench/h200_compare.sh"
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
          "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
          "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16"}
PEER = """import os
accum = int(os.environ["ACCUM"])
assert os.environ["CLIP"] == "0" and os.environ["CUDNN"] == "1"
print(f"4b c0 bs4 accum{accum} clip0.0 seq4096 step 0.881s tok/s {1000 * accum} model TFLOP/s 5 peakGB 119.0 loss 12.1")
"""

sys.path.insert(0, str(ROOT / "tests/bench"))
import compare_inputs  # noqa: E402
import compare_part  # noqa: E402
import compare_summary  # noqa: E402


@pytest.fixture
def command(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/fsdp2_reference.py").write_text(PEER)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    launcher = tmp_path / "launch"
    launcher.write_text(f'#!/bin/sh\nprogram=$1\nshift\nexec "{BUILD}/$program" "$@"\n')
    launcher.chmod(0o755)
    return [COMPARE, f"PEERS={tmp_path}/peers", f"BIN={launcher}", f"OUT={tmp_path}/out", f"SCRATCH={tmp_path}/scratch",
            f"PYTHON={sys.executable}", f"CONFIG={tmp_path}/config.json", f"HARDWARE={ROOT}/configs/hardware/cpu-2rank.yaml",
            "SEQ=16"]


def test_a_toy_comparison_gives_all_numbers(tmp_path, command):
    subprocess.run([*command, "--arrival"], check=True, timeout=240)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    cases = ["tok_s_8", "tok_s_16", "tok_s_32", "deferred_8", "split_8", "deferred_16", "split_16"]
    assert {f"slidedp_{case}" for case in cases} <= set(summary)
    assert summary["fsdp2_best_tok_s"] == 1000 and summary["fsdp2_accumulated_tok_s"] == 2000
    assert summary["vs_fsdp2_best"] == pytest.approx(summary["slidedp_tok_s_8"] / 1000)
    assert summary["vs_fsdp2_accumulated"] == pytest.approx(summary["slidedp_tok_s_8"] / 2000)
    assert summary["floor_share_8"] == pytest.approx(1.54 * summary["slidedp_tok_s_8"] / (8 * 16))
    for case in ["8", "16", "32", "arrival_8", "split_16"]:
        assert -1 < summary[f"exposed_share_{case}"] < 1  # toy steps are short: timers may disagree
    for case in compare_summary.PLANS[:-1]:
        assert summary[f"predicted_tok_s_{case}"] > 0
    order = (tmp_path / "out/parts/slidedp_arrival_8.json").read_text()
    assert '"arrival"' in order and '"status": "ok"' in order
    assert "| slidedp_32 |" in (tmp_path / "out/table.md").read_text()


def test_a_part_that_fails_says_why(tmp_path):
    for limit, script, error in [("60", "import sys; sys.exit('no such card')", "no such card"),
                                 ("1", "import time; time.sleep(60)", "out of time")]:
        subprocess.run([sys.executable, ROOT / "tests/bench/compare_part.py", "peer", "--parts", tmp_path, "--limit", limit,
                        "--", sys.executable, "-c", script], check=True, timeout=50)
        part = json.loads((tmp_path / "peer.json").read_text())
        assert part["error"] == error and "tok_s" not in part
        assert error in compare_summary.table({"peer": part}, {})
        assert "vs_fsdp2_best" not in compare_summary.summarize({"fsdp2_4": part}, {}, {"8": 1, "8b": 1})


def test_an_unknown_option_is_refused(command):
    result = subprocess.run([*command, "SIZE=1"], capture_output=True, text=True)
    assert result.returncode == 2 and "PEERS=DIR" in result.stderr


def test_without_time_left_parts_are_left_out(tmp_path, command):
    subprocess.run([*command, "BUDGET=0"], check=True, timeout=240)
    assert not list((tmp_path / "out/parts").glob("*.json"))
    assert json.loads((tmp_path / "out/summary.json").read_text())["predicted_tok_s_8"] > 0


def run_log(file, steps, tasks):
    database = sqlite3.connect(file)
    database.executescript("CREATE TABLE runs (status, error); INSERT INTO runs VALUES ('ok', NULL);"
                           "CREATE TABLE machine (key, value);"
                           "CREATE TABLE steps (step, step_s, tokens, loss, predicted_step_s, skipped);"
                           "CREATE TABLE tasks (source, step, kind, lane, rank, start_s, end_s)")
    database.executemany("INSERT INTO steps VALUES (?, ?, 100, 1.0, 2.5, 0)", steps)
    database.executemany("INSERT INTO tasks VALUES ('measured', ?, ?, ?, 0, ?, ?)", tasks)
    database.commit()
    database.close()


def test_the_steady_part_starts_with_the_third_step_and_overlap_counts_once(tmp_path):
    tasks = []
    for step in range(5):
        tasks += [(step, "fwd", "compute", 0.0, 1.0), (step, "bwd", "compute", 0.5, 1.5), (step, "h2d", "h2d", 0.0, 2.0)]
    run_log(tmp_path / "run.db", [(0, 9.0), (1, 8.0), (2, 2.0), (3, 2.0), (4, 4.0)], tasks)
    found = compare_part.from_run_log(tmp_path / "run.db")
    assert found["step_s"] == 2.0 and found["tok_s"] == 50.0 and found["predicted_step_s"] == 2.5
    assert found["compute_busy_share"] == 0.75  # 1.5 of 2 s twice, 1.5 of 4 s once
    assert found["busy_s"] == {"bwd": 1.0, "fwd": 1.0, "h2d": 2.0}


def test_two_steps_have_no_steady_part(tmp_path):
    run_log(tmp_path / "run.db", [(0, 9.0), (1, 8.0)], [])
    assert "tok_s" not in compare_part.from_run_log(tmp_path / "run.db")


def test_gpu_load_leaves_out_idle_samples_and_broken_lines():
    text = "700.0, 1500, 100, 60\n500.0, 1700, 95, 50\n90.0, 345, 0, 40\n[N/A], 1, 100, 40\n700.0, 15"
    assert compare_part.gpu_load(text) == {"power_w": 600.0, "sm_clock_mhz": 1600.0, "temperature_c": 55.0, "busy_samples": 2}


def test_the_touched_share_counts_a_step_at_a_time():
    tokens = compare_inputs.numpy.array([[1, 1], [2, 3], [1, 2], [1, 2]])
    assert compare_inputs.touched_share(tokens, 2, 10) == pytest.approx((3 + 2) / 2 / 10)
