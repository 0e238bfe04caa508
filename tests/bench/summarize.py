"""Joins the benchmark's and torch's JSON into OUT/host_engine.json and writes the ratios to OUT/summary.json. With
--print elements: how many elements the benchmark's Adam updated with most threads, and those threads."""
import argparse
import json
from pathlib import Path


def load(file):
    return json.loads(Path(file).read_text(encoding="utf-8"))


def by_name(bench):
    """{case: its row} of the rows with most threads."""
    rows = [row for row in bench["benchmarks"] if row.get("run_type") == "iteration"]
    most = max(row["workers"] for row in rows)
    return {row["name"].split("/threads:")[0]: row for row in rows if row["workers"] == most}


def summarize(bench, torch):
    rows = by_name(bench)
    rate = lambda name: rows[name]["elements_per_s"]
    adam = rate("adam/bf16/1")
    ratios = {
        "adam_vs_stream": adam / rate("stream/read_modify_write"),
        "two_sources_vs_separate": rate("adam/bf16/2") / rate("sum_then_adam/bf16/2"),
        "eight_sources_vs_separate": rate("adam/bf16/8") / rate("sum_then_adam/bf16/8"),
    }
    if torch is not None:
        ratios["adam_vs_torch"] = adam / torch["step"]["elements_per_s"]
        ratios["adam_vs_torch_with_copy"] = adam / torch["step_with_copy"]["elements_per_s"]
        ratios["torch_gbps"] = torch["step"]["gbps"]
        ratios["torch_elements_per_s"] = torch["step"]["elements_per_s"]
        ratios["torch_with_copy_elements_per_s"] = torch["step_with_copy"]["elements_per_s"]
    ratios["adam_elements_per_s"] = adam
    for name in sorted(rows):
        key = name.replace("/", "_").replace("+", "_")
        ratios[f"{key}_gbps"] = rows[name]["gbps"]
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", required=True, help="JSON of the benchmark program")
    parser.add_argument("--torch", help="JSON of torch_adam.py")
    parser.add_argument("--out", help="folder for host_engine.json and summary.json")
    parser.add_argument("--print", choices=["elements"], help="print instead of writing")
    args = parser.parse_args()
    bench = load(args.bench)
    if args.print == "elements":
        row = by_name(bench)["adam/bf16/1"]
        print(int(row["elements"]), int(row["workers"]))
        return
    torch = load(args.torch) if args.torch else None
    out = Path(args.out)
    (out / "host_engine.json").write_text(json.dumps({"bench": bench, "torch": torch}, indent=1) + "\n")
    (out / "summary.json").write_text(json.dumps(summarize(bench, torch), indent=1) + "\n")


if __name__ == "__main__":
    main()
