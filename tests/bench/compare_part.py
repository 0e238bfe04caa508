"""Runs one part of a comparison under a time limit, with the GPU's power and clock sampled beside it, and writes what
it measured to PARTS/NAME.json whatever became of it.

    compare_part.py NAME[,NAME...] --parts DIR --limit SECONDS [--runs RUN_DIR] -- COMMAND ...

With --runs the numbers come from RUN_DIR's run.db (of several plans run-1.db and so on, one NAME a plan), else from the
lines that the command prints: `tok/s N` and `step N s` of fsdp2_reference.py, or JSON with `tok_s` of
deepspeed_offload.py.
"""
import argparse
import json
import os
import re
import resource
import signal
import sqlite3
import statistics
import subprocess
import time
from pathlib import Path

FIRST_STEADY_STEP = 2  # the first two steps fill caches and lanes
QUERY = "power.draw,clocks.sm,utilization.gpu,temperature.gpu"


def covered(intervals):
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def lane_busy(database, source, step):
    """Mean over ranks of the seconds in which the compute lane works, or None if the step's tasks were not logged."""
    ranks = {}
    for rank, start, end in database.execute(
            "SELECT rank, start_s, end_s FROM tasks WHERE source = ? AND step = ? AND lane = 'compute'", (source, step)):
        ranks.setdefault(rank, []).append((start, end))
    return statistics.mean(covered(intervals) for intervals in ranks.values()) if ranks else None


def busy_by_kind(database, steps):
    """Median over the steps of each kind's busy seconds, all ranks and workers together."""
    totals = {}
    for step in steps:
        for kind, busy in database.execute("SELECT kind, SUM(end_s - start_s) FROM tasks WHERE source = 'measured' AND "
                                           "step = ? GROUP BY kind", (step,)):
            totals.setdefault(kind, []).append(busy)
    return {kind: statistics.median(busy) for kind, busy in sorted(totals.items())}


def from_run_log(file):
    """The steady part of one run; with fewer than three steps there is none."""
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    rows = database.execute("SELECT step, step_s, tokens, loss, predicted_step_s, skipped FROM steps "
                            "ORDER BY step").fetchall()
    status, error = database.execute("SELECT status, error FROM runs").fetchone()
    found = {"status": status, "error": error, "steps": len(rows), "loss": [row[3] for row in rows],
             "skipped": sum(row[5] for row in rows), "machine": dict(database.execute("SELECT key, value FROM machine"))}
    steady = rows[FIRST_STEADY_STEP:]
    if not steady:
        return found
    step_s = statistics.median(row[1] for row in steady)
    found.update(step_s=step_s, tok_s=steady[0][2] / step_s, steady_step_s=[row[1] for row in steady],
                 predicted_step_s=steady[0][4])
    busy = {row[0]: lane_busy(database, "measured", row[0]) for row in steady}
    shares = [busy[row[0]] / row[1] for row in steady if busy[row[0]] is not None]
    if shares:
        found["compute_busy_share"] = statistics.median(shares)
        found["exposed_share"] = 1 - found["compute_busy_share"]
        found["busy_s"] = busy_by_kind(database, [row[0] for row in steady])
    return found


def from_output(text):
    """Of the peers' result lines the fastest: a peer is compared at its best."""
    found = []
    for line in text.splitlines():
        if match := re.search(r"step ([\d.]+)s tok/s (\d+) .*peakGB ([\d.]+) loss ([\d.]+)", line):
            found.append({"step_s": float(match[1]), "tok_s": float(match[2]), "gpu_peak_gb": float(match[3]),
                          "loss": [float(match[4])], "line": line})
        elif line.startswith("{") and '"tok_s"' in line:
            found.append(json.loads(line))
    return max(found, key=lambda row: row["tok_s"]) if found else {}


def gpu_load(text):
    """Means over the samples in which the GPU works."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append([float(cell) for cell in line.split(",")])
        except ValueError:
            continue  # a line cut off at the end, or a value that this GPU does not tell
    rows = [row for row in rows if len(row) == 4 and row[2] >= 90]
    if not rows:
        return {}
    power, clock, _, heat = (statistics.mean(column) for column in zip(*rows))
    return {"power_w": power, "sm_clock_mhz": clock, "temperature_c": heat, "busy_samples": len(rows)}


class GpuSampler:
    """nvidia-smi once a second into a file; nothing where there is none."""

    def __init__(self, file):
        self.file, self.process = file, None

    def __enter__(self):
        try:
            with self.file.open("w") as output:
                command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-l", "1"]
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        except OSError:
            pass
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def load(self):
        return gpu_load(self.file.read_text()) if self.file.exists() else {}


def run(command, limit, log):
    """Exit code of the command, None if it ran out of time, and its seconds."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, time.monotonic() - start


def reason(code, log):
    """Why a command left no result: its last words."""
    if code is None:
        return "out of time"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"ended with {code}"


def results(names, runs, log):
    if runs is None:
        return {names[0]: from_output(log.read_text(errors="replace"))}
    found = {}
    for index, name in enumerate(names):
        file = runs / ("run.db" if len(names) == 1 else f"run-{index + 1}.db")
        found[name] = from_run_log(file) if file.exists() else {}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", help="comma-separated")
    parser.add_argument("--parts", required=True, type=Path)
    parser.add_argument("--limit", required=True, type=float)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    names = args.names.split(",")
    args.parts.mkdir(parents=True, exist_ok=True)
    log = args.parts / f"{names[0]}.log"
    with GpuSampler(args.parts / f"{names[0]}.gpu.csv") as sampler:
        code, wall_s = run(args.command, args.limit, log)
    shared = {"exit_code": code, "timed_out": code is None, "wall_s": wall_s, "command": args.command, "gpu": sampler.load(),
              "host_peak_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20}
    for name, found in results(names, args.runs, log).items():
        if "tok_s" not in found and not found.get("error"):
            found["error"] = reason(code, log)
        (args.parts / f"{name}.json").write_text(json.dumps({"name": name, **shared, **found}, indent=1) + "\n")
        rate = f"{found['tok_s']:.0f} tokens/s" if "tok_s" in found else found["error"]
        print(f"{name}: {rate} ({wall_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
