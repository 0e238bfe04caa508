#!/usr/bin/env python3
"""Shows what the demo did (loss curve, answers, predicted and measured time) and checks it; exit code 1 if a check
fails."""
import argparse
import json
import sqlite3
import sys
from pathlib import Path

LAST_STEPS = 5
GOOD_LOSS = 0.5
# Both compute the same fp32 forward pass with sums in another order.
SAME_LOSS = 1e-5
BAR = 50


def read_losses(database):
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT loss FROM steps WHERE run_id = (SELECT max(id) FROM runs) ORDER BY step").fetchall()
    return [float("nan") if loss is None else loss for (loss,) in rows]


def loss_curve(losses):
    """One bar a step, scaled to the largest loss."""
    finite = [loss for loss in losses if loss == loss]
    scale = BAR / max(finite + [1e-12])
    lines = []
    for step, loss in enumerate(losses, 1):
        bar = "#" * max(1, round(loss * scale)) if loss == loss else "not a number"
        lines.append(f"  step {step:3d}  {loss:7.4f}  {bar}")
    return lines


def mean_of_last(losses):
    last = losses[-LAST_STEPS:]
    return sum(last) / len(last) if len(losses) >= LAST_STEPS else float("nan")


def checks(losses, before, after, export, rerun_losses):
    """[(passed, sentence)]"""
    mean = mean_of_last(losses)
    parsed_before = sum(a["parses"] for a in before)
    good_after = sum(a["parses"] and a["right_unit"] for a in after)
    again = rerun_losses[0] if rerun_losses else float("nan")
    difference = abs(again - export["loss"]) / export["loss"]
    return [
        (mean <= GOOD_LOSS, f"mean of the last {LAST_STEPS} losses {mean:.4f} is at most {GOOD_LOSS}"),
        (parsed_before == 0, f"{parsed_before} of {len(before)} answers parsed before training (none should)"),
        (good_after == len(after) > 0, f"{good_after} of {len(after)} answers parse and have the right unit after it"),
        (export["same_tensors"] and export["all_bf16"] and export["tensors"] > 0,
         f"the export has the source's {export['tensors']} tensors, names and shapes, all bf16"),
        (export["changed"] == export["tensors"], f"training changed {export['changed']} of {export['tensors']} tensors"),
        (difference <= SAME_LOSS, f"first loss of a run from the export {again:.8f}, transformers' {export['loss']:.8f}: "
                                  f"relative difference {difference:.1e} is at most {SAME_LOSS:.0e}"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the demo's directory")
    work = parser.parse_args().work
    before, after, export = (json.loads((work / name).read_text(encoding="utf-8"))
                             for name in ("before.json", "after.json", "export.json"))
    losses = read_losses(work / "run" / "run.db")
    print("Loss\n" + "\n".join(loss_curve(losses)))
    print("\nAnswers to questions that were not in the data")
    for old, new in zip(before, after):
        print(f"  {old['question']}\n    before: {old['answer']}\n    after:  {new['answer']}")
    print("\n" + (work / "run" / "report.md").read_text(encoding="utf-8"))
    results = checks(losses, before, after, export, read_losses(work / "rerun" / "run.db"))
    print("Checks")
    for passed, sentence in results:
        print(f"  {'PASS' if passed else 'FAIL'}  {sentence}")
    return 0 if all(passed for passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
