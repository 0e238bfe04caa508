"""What a comparison trains: rows of token ids, training specs and a checkpoint with random weights.

    compare_inputs.py rows --config CONFIG.json --out DIR [--ids FILE.npy]    DIR/data.safetensors, DIR/train-*.yaml
    compare_inputs.py model --config CONFIG.json --out DIR                    a Hugging Face checkpoint in DIR
"""
import argparse
import json
from pathlib import Path

import numpy

ROWS = 192  # enough for six steps of the largest batch; longer runs start again
BATCHES = {"8": (8, 0), "16": (16, 0), "32": (32, 0), "8-clip": (8, 1), "16-clip": (16, 1)}  # rows a step, clipping norm
SPEC = """schema: slidedp.train/1
seq: {seq}
batch_rows: {rows}
steps: 8
seed: 1
adam: {{learning_rate: 1.0e-05, beta1: 0.9, beta2: 0.999, eps: 1.0e-08, weight_decay: 0.01}}
max_grad_norm: {clip}
touched_vocabulary_share: {share:.4f}
"""


def token_rows(vocabulary, seq, ids):
    """Rows of real ids, repeated as needed; without any, of the distribution that fsdp2_reference.py draws from: rank r
    has the probability 1 / (r + 2.7)."""
    if ids is not None:
        tokens = numpy.load(ids)
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise SystemExit(f"{ids}: token ids must be from 0 to {vocabulary - 1}")
        return numpy.resize(tokens, (ROWS, seq)).astype(numpy.int32)
    weights = 1 / (numpy.arange(vocabulary) + 2.7)
    return numpy.random.default_rng(7).choice(vocabulary, (ROWS, seq), p=weights / weights.sum()).astype(numpy.int32)


def touched_share(tokens, rows, vocabulary):
    """Mean share of the vocabulary in a step's rows."""
    steps = len(tokens) // rows
    return sum(len(numpy.unique(tokens[i * rows:(i + 1) * rows])) for i in range(steps)) / steps / vocabulary


def write_rows(config, seq, ids, out):
    from safetensors.numpy import save_file
    vocabulary = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
    tokens = token_rows(vocabulary, seq, ids)
    labels = tokens.copy()
    labels[:, 0] = -100  # nothing comes before a document's first token
    positions = numpy.tile(numpy.arange(seq, dtype=numpy.int32), (ROWS, 1))
    save_file({"input_ids": tokens, "labels": labels, "position_ids": positions}, out / "data.safetensors",
              {"format": "slidedp.packed", "version": "1", "seq": str(seq), "vocabulary_size": str(vocabulary),
               "tokenizer_hash": "sha256:" + "0" * 64})
    for name, (rows, clip) in BATCHES.items():
        share = touched_share(tokens, rows, vocabulary)
        (out / f"train-{name}.yaml").write_text(SPEC.format(seq=seq, rows=rows, clip=clip, share=share))


def write_model(config, out):
    import torch
    import transformers
    torch.manual_seed(11)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config),
                                                              dtype=torch.bfloat16)
    model.save_pretrained(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "model"])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--ids", help="int32 token ids, .npy")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "rows":
        write_rows(args.config, args.seq, args.ids, args.out)
    else:
        write_model(args.config, args.out)


if __name__ == "__main__":
    main()
