#!/usr/bin/env python3
"""Checks an exported model against its source and computes transformers' loss of it on the first rows of a data set."""
import argparse
import json
from pathlib import Path


def describe(folder):
    """{tensor name: (type, shape)} of all safetensors files of a model directory."""
    from safetensors import safe_open

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                tensors[name] = (part.get_dtype(), tuple(part.get_shape()))
    return tensors


def changed_tensors(source, export):
    """Names of the tensors whose bytes differ."""
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    second = AutoModelForCausalLM.from_pretrained(export, dtype="auto").state_dict()
    return [name for name in first if not first[name].equal(second[name])]


def document_mask(position_ids):
    """[rows, 1, seq, seq] bool: causal, and inside a document only. A 4-D mask is what isolates packed documents."""
    import torch

    document = (position_ids == 0).cumsum(1)
    seq = position_ids.shape[1]
    causal = torch.tril(torch.ones(seq, seq, dtype=torch.bool))
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


def reference_loss(folder, data, rows):
    """Mean loss over the target tokens of the first rows, in fp32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = {name: tensor[:rows].long() for name, tensor in load_file(data).items()}
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"],
                       attention_mask=document_mask(batch["position_ids"]), use_cache=False).logits
    targets = batch["labels"][:, 1:].flatten()
    # The sum over tokens in double precision, so that only the model's own rounding is left.
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), targets, ignore_index=-100).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="model directory that training started from")
    parser.add_argument("--export", type=Path, required=True, help="exported model directory")
    parser.add_argument("--data", type=Path, required=True, help="packed data set")
    parser.add_argument("--rows", type=int, required=True, help="rows of one step")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    source, export = describe(options.source), describe(options.export)
    changed = changed_tensors(options.source, options.export)
    result = {
        "tensors": len(export),
        "same_tensors": source == export,
        "all_bf16": all(dtype == "BF16" for dtype, _ in export.values()),
        "changed": len(changed),
        "loss": reference_loss(options.export, options.data, options.rows),
    }
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"  {result['tensors']} tensors, {result['changed']} changed by training; transformers' loss {result['loss']:.8f}")


if __name__ == "__main__":
    main()
