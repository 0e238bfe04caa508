"""Random checkpoints, packed rows of text tokens and calls of the programs, for the checks on a GPU."""

import json
import pathlib
import shlex
import subprocess

import numpy
import safetensors.torch
import torch

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
         "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
         "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_sliding_window": False, "dtype": "bfloat16"}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


# The shapes of the models of these names; config.json's keys.
SHAPES = {
    "SmolLM2-135M": LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rope_parameters": rope(100000.0)},
    "Qwen3-0.6B": QWEN3 | {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_parameters": rope(1000000.0)},
    "Llama-3.2-1B": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "small": LLAMA | {
        "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "rope_parameters": rope(10000.0)},
    "tiny": LLAMA | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_parameters": rope(10000.0)},
}


def tensor_shapes(config):
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {f"model.layers.{i}.input_layernorm.weight": (hidden,),
                   f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
                   attention + "q_proj.weight": (queries, hidden), attention + "k_proj.weight": (keys, hidden),
                   attention + "v_proj.weight": (keys, hidden), attention + "o_proj.weight": (hidden, queries),
                   mlp + "gate_proj.weight": (width, hidden), mlp + "up_proj.weight": (width, hidden),
                   mlp + "down_proj.weight": (hidden, width)}
        if config["model_type"] == "qwen3":
            shapes |= {attention + "q_norm.weight": (head_dim,), attention + "k_norm.weight": (head_dim,)}
    return shapes


def make_checkpoint(name, folder):
    """A seeded random checkpoint in bf16; norms differ from 1 so that they count."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(11)
    tensors = {}
    for tensor, shape in tensor_shapes(SHAPES[name]).items():
        values = torch.randn(shape, generator=random, device=device)
        values = 1 + 0.1 * values if len(shape) == 1 else 0.02 * values
        tensors[tensor] = values.to(torch.bfloat16).cpu()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return folder


def text_ids(options, vocabulary):
    """Token ids of --ids (int32, .npy), or the bytes of --text: real text either way. Folded into the vocabulary."""
    if options.ids:
        ids = numpy.load(options.ids)
    else:
        ids = numpy.frombuffer(pathlib.Path(options.text).read_bytes(), numpy.uint8)
    return (ids.astype(numpy.int64) % vocabulary).astype(numpy.int32)


def add_text_options(parser):
    parser.add_argument("--ids", help="token ids of text, a one-dimensional .npy file; such a file comes from "
                        "numpy.save(FILE, numpy.array(AutoTokenizer.from_pretrained(MODEL)(TEXT)['input_ids']))")
    parser.add_argument("--text", default=__file__, help="without --ids: a text file, whose bytes are the tokens")


def make_rows(ids, vocabulary, count, seq, packed, file):
    """Writes `count` rows: one document each, or several of up to 0.7 rows. Returns the tensors."""
    random = numpy.random.default_rng(7)
    tokens = numpy.resize(ids, count * seq).reshape(count, seq)
    positions = numpy.tile(numpy.arange(seq, dtype=numpy.int32), (count, 1))
    labels = tokens.copy()
    labels[:, 0] = -100
    for row in range(count if packed else 0):
        start = 0
        while start < seq:
            end = min(seq, start + int(random.integers(seq // 10, 7 * seq // 10)))
            positions[row, start:end] = numpy.arange(end - start)
            labels[row, start] = -100
            start = end
    tensors = {name: torch.from_numpy(values) for name, values in
               {"input_ids": tokens, "labels": labels, "position_ids": positions}.items()}
    metadata = {"format": "slidedp.packed", "version": "1", "seq": str(seq), "vocabulary_size": str(vocabulary),
                "tokenizer_hash": "sha256:" + "0" * 64}
    safetensors.torch.save_file(tensors, file, metadata)
    return tensors


def run(command, timeout=300):
    """Runs `command` (the first element may hold several words) and returns what it printed."""
    command = shlex.split(str(command[0])) + [str(word) for word in command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout
