"""Losses of a training run with clipping beside FSDP2 with an fp32 master, on the same GPU, rows and random weights.

    gpu_losses.py --plan COMMAND --run COMMAND --hardware h200.yaml --config Qwen3-4B.json --work DIR --out losses.json
                  [--ids ids.npy] [--pin FIELD=VALUE ...]

The commands start slidedp-plan and slidedp-run. FSDP2 computes in bf16 and reduces in fp32; both sides use AdamW without
weight decay and clip the global gradient norm to 1. Every loss must lie within 1 % of FSDP2's. Writes the losses and
gradient norms of both, anew after each side.
"""

import argparse
import json
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import time

import torch
import transformers

import gpu_models

BOUND = 0.01
TRAIN = """schema: slidedp.train/1
seq: {seq}
batch_rows: {rows}
steps: {steps}
seed: 1
adam: {{learning_rate: {rate}, beta1: 0.9, beta2: 0.999, eps: 1.0e-08, weight_decay: 0}}
max_grad_norm: 1
touched_vocabulary_share: 0.05
"""


def ours(options):
    plan, out = options.work / "plan.yaml", options.work / "run"
    command = [options.plan, "--model", options.work / "model", "--hardware", options.hardware, "--train",
               options.work / "train.yaml", "--out", plan]
    for pin in options.pin:
        command += ["--pin", pin]
    gpu_models.run(command)
    gpu_models.run([options.run, "--plan", plan, "--model", options.work / "model", "--data", options.work / "rows",
                    "--out", out, "--overwrite"], timeout=options.seconds)
    with sqlite3.connect(out / "run.db") as database:
        rows = database.execute("SELECT loss, gradient_norm FROM steps ORDER BY step").fetchall()
    shutil.rmtree(out)
    return {"losses": [row[0] for row in rows], "norms": [row[1] for row in rows]}


def mean_loss(model, input_ids, labels):
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    total = 0.0
    for begin in range(0, len(targets), 2048):  # the logits of all tokens at once would be GiBs in fp32
        part = slice(begin, begin + 2048)
        total = total + torch.utils.checkpoint.checkpoint(
            lambda h, t: torch.nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="sum"), hidden[part],
            targets[part], use_reentrant=False)
    return total / len(targets)


class Loss(torch.nn.Module):
    """The root that FSDP2 shards: the head's matrix is used outside the transformer's own forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        return mean_loss(self.model, input_ids, labels)


def fsdp2(options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.work / "model", dtype=torch.float32,
                                                              attn_implementation="sdpa").to(options.device).train()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    model = fully_shard(Loss(model), mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0, fused=True)
    rows = gpu_models.safetensors.torch.load_file(options.work / "rows")
    result = {"losses": [], "norms": []}
    for step in range(options.steps):
        part = slice(step * options.rows, (step + 1) * options.rows)
        loss = model(rows["input_ids"][part].long().to(options.device), rows["labels"][part].long().to(options.device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
        result["norms"].append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
    torch.distributed.destroy_process_group()
    return result


def make_inputs(options):
    vocabulary = json.loads(options.config.read_text())["vocab_size"]
    inputs = pathlib.Path(__file__).resolve().parents[1] / "bench" / "compare_inputs.py"
    subprocess.run([sys.executable, inputs, "model", "--config", options.config, "--out", options.work / "model"],
                   check=True, stdout=subprocess.DEVNULL)
    gpu_models.make_rows(gpu_models.text_ids(options, vocabulary), vocabulary, options.steps * options.rows,
                         options.seq, False, options.work / "rows")
    (options.work / "train.yaml").write_text(
        TRAIN.format(seq=options.seq, rows=options.rows, steps=options.steps, rate=f"{options.rate:.3e}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--config", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--pin", action="append", default=[], help="of the plan, such as update=split")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--seconds", type=float, default=240, help="limit of our run")
    gpu_models.add_text_options(parser)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.work.mkdir(parents=True, exist_ok=True)
    found = {"bound": BOUND}
    begin = time.monotonic()
    make_inputs(options)
    found["ours"] = ours(options) | {"seconds": time.monotonic() - begin}
    options.out.write_text(json.dumps(found, indent=1))
    begin = time.monotonic()
    found["fsdp2"] = fsdp2(options) | {"seconds": time.monotonic() - begin}
    differences = [abs(a - b) / b for a, b in zip(found["ours"]["losses"], found["fsdp2"]["losses"], strict=True)]
    found |= {"largest_difference": max(differences), "passed": max(differences) <= BOUND}
    options.out.write_text(json.dumps(found, indent=1))
    print({key: value for key, value in found.items() if not isinstance(value, dict)})
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
