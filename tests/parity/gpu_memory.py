"""GPU memory of training runs, measured beside planned, over plans of three model shapes.

    gpu_memory.py --plan COMMAND --run COMMAND --hardware h200.yaml --work DIR --out memory.json

The commands start slidedp-plan and slidedp-run. The GPU must be idle: measured is what the whole GPU has in use at the
end of a run (a run gives nothing back before), less what was in use before it. Planned is the plan's buffers and
temporaries plus one constant for what the driver's context and the libraries' code take. That constant is measured
here, as the most that any of these runs had beyond its buffers and temporaries; what the hardware profile says
(device.context_bytes) is shown beside it. Every run must stay inside 0.95 to 1 times its plan.
"""

import argparse
import json
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import time

import gpu_models

ROWS, SEQ, STEPS = 8, 1024, 4
MIB = 1 << 20
LOWEST, HIGHEST = 0.95, 1.0

# Model and pins; the micro-batches divide the rows evenly.
PLANS = [
    ("SmolLM2-135M", {"activation": "keep", "accumulator": "bf16"}),
    ("SmolLM2-135M", {"activation": "selective", "accumulator": "fp32", "micro_batches": 2}),
    ("SmolLM2-135M", {"activation": "recompute", "vocabulary_kept": "true"}),
    ("SmolLM2-135M", {"activation": "offload", "update": "deferred", "vocabulary_rows": "all"}),
    ("SmolLM2-135M", {"activation": "recompute:10,selective:10,keep:10", "accumulator": "fp32", "waves": 2}),
    ("Qwen3-0.6B", {"activation": "selective", "accumulator": "bf16"}),
    ("Qwen3-0.6B", {"activation": "recompute", "accumulator": "fp32", "micro_batches": 4}),
    ("Qwen3-0.6B", {"activation": "offload", "accumulator": "fp32", "waves": 2}),
    ("Qwen3-0.6B", {"activation": "keep", "update": "split", "vocabulary_kept": "true", "head_chunk_tokens": 2048}),
    ("Llama-3.2-1B", {"activation": "keep", "accumulator": "bf16"}),
    ("Llama-3.2-1B", {"activation": "recompute", "accumulator": "fp32", "micro_batches": 2, "layer_slots": 3}),
    ("Llama-3.2-1B", {"activation": "offload", "vocabulary_kept": "true"}),
]

TRAIN = f"""schema: slidedp.train/1
seq: {SEQ}
batch_rows: {ROWS}
steps: {STEPS}
seed: 1
adam: {{learning_rate: 0.0001, beta1: 0.9, beta2: 0.999, eps: 1.0e-08, weight_decay: 0}}
max_grad_norm: 0
touched_vocabulary_share: 0.05
"""


def used_before():
    """Bytes in use on the first GPU, by nvidia-smi: it needs no context of its own."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return 0
    done = subprocess.run([smi, "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, check=True, timeout=30)
    return int(done.stdout.split()[0]) * MIB


def facts(log):
    with sqlite3.connect(log) as database:
        status, = database.execute("SELECT status FROM runs").fetchone()
        found = dict(database.execute("SELECT key, value FROM machine"))
        losses = [loss for loss, in database.execute("SELECT loss FROM steps ORDER BY step")]
    assert status == "ok" and len(losses) == STEPS and None not in losses, (status, losses)
    return found


def measure(options, model, pins):
    folder = options.work / model
    vocabulary = gpu_models.SHAPES[model]["vocab_size"]
    data = options.work / f"{model}.data"
    if not folder.exists():
        gpu_models.make_checkpoint(model, folder)
        gpu_models.make_rows(gpu_models.text_ids(options, vocabulary), vocabulary, ROWS * STEPS, SEQ, False, data)
    pins = pins | {"micro_batch_rows": ROWS // (pins.get("micro_batches", 1) * pins.get("waves", 1)),
                   "micro_batches": pins.get("micro_batches", 1)}
    plan, out = options.work / "plan.yaml", options.work / "run"
    command = [options.plan, "--model", folder, "--hardware", options.hardware, "--train", options.work / "train.yaml",
               "--out", plan]
    for field, value in pins.items():
        command += ["--pin", f"{field}={value}"]
    gpu_models.run(command)
    before = used_before()
    gpu_models.run([options.run, "--plan", plan, "--model", folder, "--data", data, "--out", out, "--overwrite"])
    found = facts(out / "run.db")
    shutil.rmtree(out)
    result = {"model": model, "pins": pins, "used_before": before}
    for key in ("device_buffer_planned_bytes", "device_buffer_peak_bytes", "temporary_planned_bytes",
                "temporary_peak_bytes", "device_used_bytes", "device_context_planned_bytes"):
        result[key] = int(found[key])
    result["used"] = result["device_used_bytes"] - before
    result["without_context"] = result["device_buffer_planned_bytes"] + result["temporary_planned_bytes"]
    result["context"] = result["used"] - result["without_context"]
    return result


def judge(results):
    """Adds the ratios; returns the summary."""
    good = [result for result in results if "error" not in result]
    if not good:
        return {"plans": len(results), "failed": len(results)}
    constant = -(-max(result["context"] for result in good) // (16 * MIB)) * 16 * MIB  # rounded up to 16 MiB
    failed = len(results) - len(good)
    for result in good:
        result["ratio"] = result["used"] / (result["without_context"] + constant)
        result["ratio_with_profile"] = result["used"] / (result["without_context"] +
                                                         result["device_context_planned_bytes"])
        result["buffer_ratio"] = result["device_buffer_peak_bytes"] / result["device_buffer_planned_bytes"]
        result["temporary_ratio"] = result["temporary_peak_bytes"] / result["temporary_planned_bytes"]
        result["passed"] = (LOWEST <= result["ratio"] <= HIGHEST and result["buffer_ratio"] == 1.0 and
                            result["temporary_ratio"] <= 1.0)
        failed += not result["passed"]
    return {"plans": len(results), "failed": failed, "context_bytes": constant,
            "context_bytes_min": min(result["context"] for result in good),
            "context_bytes_max": max(result["context"] for result in good),
            "memory_over_plan_min": min(result["ratio"] for result in good),
            "memory_over_plan_max": max(result["ratio"] for result in good),
            "memory_over_profile_plan_max": max(result["ratio_with_profile"] for result in good),
            "temporary_ratio_max": max(result["temporary_ratio"] for result in good)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=150, help="no new run starts when so much time has passed")
    gpu_models.add_text_options(parser)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "train.yaml").write_text(TRAIN)
    start, results, summary = time.monotonic(), [], {}
    for model, pins in PLANS:
        begin = time.monotonic()
        try:
            if begin - start > options.seconds:
                raise TimeoutError("not run: no time left")
            results.append(measure(options, model, pins))
        except Exception as error:  # one plan's failure must not hide the others' results
            results.append({"model": model, "pins": pins, "error": str(error)})
        results[-1]["seconds"] = time.monotonic() - begin
        summary = judge(results)
        options.out.write_text(json.dumps(summary | {"results": results}, indent=1))
    for result in results:
        print(result["model"], result["pins"], result.get("error") or
              f"used {result['used'] / MIB:.0f} MiB, ratio {result['ratio']:.4f}, "
              f"context {result['context'] / MIB:.0f} MiB, temporaries "
              f"{result['temporary_ratio']:.4f}", f"{result['seconds']:.1f} s")
    print(json.dumps(summary))
    sys.exit(1 if summary["failed"] else 0)


if __name__ == "__main__":
    main()
