"""Times slidedp-plan for a 72B model on 8 GPUs: writes summary.json beside this file and prints the report's table.

Usage, from the repository's root: python3 results/planner-search/measure.py build/slidedp-plan
"""

import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
CONFIGS = HERE.parent.parent / "configs"
# Eight of the catalogue's H200 in one host: two sockets' cores and memory, two roots.
HOST = ["gpus=8", "host.memory_bytes=2TiB", "host.cores=96", "host.dram_gbps=460", "host.cpu_stream_gbps=350",
        "pcie.root_h2d_gbps=220", "pcie.root_d2h_gbps=220"]
REPEATS = 3


def plan(planner, rows):
    """Wall and CPU seconds of one search, and the best step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [planner, "--model", CONFIGS / "model/Qwen2.5-72B.json", "--hardware", CONFIGS / "hardware/h200.yaml",
                   "--train", CONFIGS / "train/sft-4b.yaml", "--out", pathlib.Path(folder) / "plan.yaml", "--json"]
        for assignment in HOST + [f"train.batch_rows={rows}"]:
            command += ["--set", assignment]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, json.loads(output)["best"][0]["step_seconds"]


def main():
    summary = {}
    print("| rows a step | wall | CPU | best step |")
    print("| --- | --- | --- | --- |")
    for rows in (8, 64, 256):
        wall, cpu, step = (statistics.median(column) for column in zip(*[plan(sys.argv[1], rows) for _ in range(REPEATS)]))
        summary |= {f"rows_{rows}_wall_s": round(wall, 2), f"rows_{rows}_cpu_s": round(cpu, 2),
                    f"rows_{rows}_best_step_s": round(step, 2)}
        print(f"| {rows} | {wall:.2f} s | {cpu:.2f} s | {step:.2f} s |")
    (HERE / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
