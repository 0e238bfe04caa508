"""Joins what is there of a comparison: OUT/plans/*.json (predictions of slidedp-plan) and OUT/parts/*.json (measured, by
compare_part.py) become OUT/summary.json (name to number), OUT/table.md and OUT/compare.json. Parts that are missing
leave their numbers out, so it can run after every part.

    compare_summary.py --out OUT [--floor-8 SECONDS] [--floor-8b SECONDS]
"""
import argparse
import json
import statistics
from pathlib import Path

PLANS = ["8", "16", "32", "deferred_8", "split_8", "deferred_16", "split_16", "8b"]
# Tokens/s on another machine of this kind, in an earlier session: their programs are not part of this comparison.
EARLIER = {"slideformer_8": 14000, "megatrain_8": 5800}


def load(folder):
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def predictions(plans):
    """{case: prediction}; an empty file is a plan that could not be made."""
    return {name: plan["best"][0] for name, plan in plans.items() if plan.get("best")}


def pooled(parts):
    """The runs slidedp_8_1, slidedp_8_2, ... as one: medians over the steps of all."""
    runs = [part for name, part in parts.items() if name.startswith("slidedp_8_") and "tok_s" in part]
    if not runs:
        return None
    step_s = statistics.median(step for run in runs for step in run["steady_step_s"])
    tokens = runs[0]["tok_s"] * runs[0]["step_s"]
    joined = {**runs[0], "name": "slidedp_8", "step_s": step_s, "tok_s": tokens / step_s,
              "runs_tok_s": [run["tok_s"] for run in runs]}
    shares = [run["exposed_share"] for run in runs if "exposed_share" in run]
    if shares:
        joined["exposed_share"] = statistics.mean(shares)
        joined["compute_busy_share"] = 1 - joined["exposed_share"]
    return joined


def with_pooled(parts):
    eight = pooled(parts)
    return parts if eight is None else {**parts, "slidedp_8": eight}


def ratio_keys(parts, rate, floors):
    """Ratios of what was measured, and the shares of the floors."""
    found = {}
    eight = rate("slidedp_8")
    if eight:
        peers = {"vs_fsdp2_best": rate("fsdp2_4"), "vs_fsdp2_accumulated": rate("fsdp2_4_accumulated"),
                 "vs_zero_offload_8": rate("zero_offload_8")}
        found.update({key: eight / peer for key, peer in peers.items() if peer})
        found.update({f"vs_{name}_earlier": eight / peer for name, peer in EARLIER.items()})
        found.update({f"rate_{rows}_to_8": rate(f"slidedp_{rows}") / eight for rows in (16, 32) if rate(f"slidedp_{rows}")})
    for case in ("8", "8b"):
        part = parts.get(f"slidedp_{case}", {})
        if "step_s" in part:
            found[f"floor_share_{case}"] = floors[case] / part["step_s"]
    return found


def summarize(parts, predicted, floors):
    parts = with_pooled(parts)
    rate = lambda name: parts.get(name, {}).get("tok_s")
    summary = {f"slidedp_{'tok_s_' + case if case in ('8', '16', '32', '8b') else case}": rate(f"slidedp_{case}")
               for case in PLANS}
    summary["fsdp2_best_tok_s"] = rate("fsdp2_4")
    summary["fsdp2_accumulated_tok_s"] = rate("fsdp2_4_accumulated")
    summary["zero_offload_tok_s_8"] = rate("zero_offload_8")
    summary.update(ratio_keys(parts, rate, floors))
    for case in [*PLANS, "arrival_8"]:
        part = parts.get(f"slidedp_{case}", {})
        for key in ("exposed_share", "compute_busy_share"):
            summary[f"{key}_{case}"] = part.get(key)
        if "exposed_share" in part:
            summary[f"exposed_s_{case}"] = part["exposed_share"] * part["step_s"]
    summary["host_peak_gib_8b"] = parts.get("slidedp_8b", {}).get("host_peak_gib")
    for case, plan in predicted.items():
        summary[f"predicted_tok_s_{case}"] = plan["tokens_per_second"]
    return {key: value for key, value in summary.items() if value is not None}


def shape(plan):
    p = plan["plan"]
    return (f"{p['update']}, {p['waves']} x {p['micro_batches']} x {p['micro_batch_rows']} rows, {p['activation']}, chunk "
            f"{p['chunk_elements'] * 2 / 2**20:g} MiB")


def cell(value, form, scale=1):
    return "" if value is None else format(value * scale, form)


def outcome(part):
    """The rate, and what is wrong with it, or why there is none."""
    if "tok_s" not in part:
        return part.get("error", "").replace("|", " ")
    trouble = [] if part.get("exit_code", 0) == 0 else ["incomplete"]
    trouble += [f"{part['skipped']} steps skipped"] if part.get("skipped") else []
    return f"{part['tok_s']:.0f}" + (f" ({', '.join(trouble)})" if trouble else "")


def plan_of(name):
    """The plan that a part ran."""
    case = name.removeprefix("slidedp_")
    return "8" if case.startswith("8_") or case == "arrival_8" else case


def table(parts, predicted):
    parts = with_pooled(parts)
    names = [f"slidedp_{case}" for case in PLANS if case in predicted]
    names += [name for name in parts if name not in names]
    lines = ["| run | tokens/s | step, s | predicted tokens/s | exposed, ms | predicted exposed, ms | power, W | SM clock, MHz | "
             "plan: GPU, host, shape |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for name in names:
        part, plan = parts.get(name, {}), predicted.get(plan_of(name)) if name.startswith("slidedp_") else None
        gpu = part.get("gpu", {})
        exposed = part["exposed_share"] * part["step_s"] if "exposed_share" in part else None
        memory = f"{plan['device_bytes'] / 2**30:.1f}, {plan['host_bytes'] / 2**30:.1f} GiB: {shape(plan)}" if plan else ""
        cells = [name, outcome(part), cell(part.get("step_s"), ".3f"), cell(plan and plan["tokens_per_second"], ".0f"),
                 cell(exposed, ".1f", 1e3), cell(plan and plan["exposed_seconds"], ".1f", 1e3),
                 cell(gpu.get("power_w"), ".0f"), cell(gpu.get("sm_clock_mhz"), ".0f"), memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--floor-8", type=float, default=1.54)
    parser.add_argument("--floor-8b", type=float, default=2.63)
    args = parser.parse_args()
    parts, predicted = load(args.out / "parts"), predictions(load(args.out / "plans"))
    summary = summarize(parts, predicted, {"8": args.floor_8, "8b": args.floor_8b})
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (args.out / "table.md").write_text(table(parts, predicted))
    (args.out / "compare.json").write_text(json.dumps({"parts": parts, "predicted": predicted}, indent=1) + "\n")


if __name__ == "__main__":
    main()
