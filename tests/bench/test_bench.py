"""The benchmark's whole way on a few MiB: that it runs and what it writes, not how fast anything is."""
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import independent_rates

ROOT = Path(__file__).resolve().parents[2]
BENCH = Path(os.environ["SLIDEDP_BUILD_DIR"]) / "tests" / "host_engine_bench"


def test_a_tiny_run_gives_all_numbers(tmp_path):
    subprocess.run([ROOT / "tests/bench/host_engine.sh", "--bench", BENCH, "--out", tmp_path, "--gib", "0.02", "--passes", "1",
                    "--threads", "1", "--python", sys.executable], check=True, timeout=240)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"adam_vs_stream", "adam_vs_torch", "adam_vs_torch_with_copy", "two_sources_vs_separate",
            "eight_sources_vs_separate", "stream_triad_gbps", "adam_weights_gbps", "norm_bf16_1_gbps"} <= set(summary)
    assert all(value > 0 for value in summary.values())
    everything = json.loads((tmp_path / "host_engine.json").read_text())
    rows = everything["bench"]["benchmarks"]
    adam = next(row for row in rows if row["name"].startswith("adam/bf16/1/"))
    assert everything["torch"]["elements"] <= adam["elements"] < everything["torch"]["elements"] + 16
    # GB/s and elements/s of a row are of the same passes.
    for row in rows:
        assert abs(row["gbps"] - row["elements_per_s"] * row["bytes_per_element"] / 1e9) < 1e-6 * row["gbps"]


def test_an_unknown_option_is_refused(tmp_path):
    result = subprocess.run([ROOT / "tests/bench/host_engine.sh", "--bench", BENCH, "--out", tmp_path, "--size", "1"],
                            capture_output=True, text=True)
    assert result.returncode == 2 and "--gib N" in result.stderr


def test_the_cost_of_the_timeline_is_measured():
    found = json.loads(subprocess.run([BENCH.parent / "timeline_cost", "--backend", "cpu", "--tasks", "20", "--rounds", "3"],
                                      capture_output=True, text=True, check=True, timeout=60).stdout)
    assert [row["bytes"] for row in found] == [256, 1 << 20, 4 << 20]
    assert all(row[f"{what}_us_{way}"] > 0 for row in found for what in ("done", "issue") for way in ("with", "without"))


def test_rates_from_outside_are_measured():
    found = json.loads(subprocess.run([sys.executable, ROOT / "tests/bench/independent_rates.py", "--gib", "0.01", "--window", "0.05"],
                                      capture_output=True, text=True, check=True, timeout=120).stdout)
    assert {f"dram_{name}{way}_gbps" for name in ("copy", "triad", "in_place") for way in ("", "_one_call")} <= set(found)
    assert all(rate > 0 for rate in found.values())


def test_rates_from_outside_count_only_while_all_run():
    # 10 bytes a second from 1 to 5, and 2 from 2 to 3, then 4 until 9.
    curves = [([1, 3, 5], [0, 20, 40]), ([2, 3, 9], [0, 2, 26])]
    assert independent_rates.rate_together(curves) == 10 + (2 + 8) / 3
