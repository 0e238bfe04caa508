"""transformers + torch.optim.AdamW with an fp32 master, the reference of the parity tests.

Each step computes with the master rounded half up to bf16 (what the ranks receive), in fp32.
"""

import pathlib

import numpy
import safetensors.torch
import torch
import transformers

SEQ, ROWS = 24, 4


def tiny_checkpoint(family, folder):
    """A random tiny checkpoint, saved as bf16 by transformers itself."""
    torch.manual_seed(3)
    common = dict(vocab_size=131, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.08)
    config = {
        "llama": lambda: transformers.LlamaConfig(tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}, **common),
        "qwen2": lambda: transformers.Qwen2Config(tie_word_embeddings=True, **common),
        "qwen3": lambda: transformers.Qwen3Config(tie_word_embeddings=True, head_dim=16, **common),
    }[family]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases start at 1 and 0: make them count
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def packed_rows(vocabulary, file):
    """Rows of two documents and padding; a quarter of the tokens are no targets."""
    random = numpy.random.default_rng(5)
    ids = random.integers(0, vocabulary, (ROWS, SEQ)).astype(numpy.int32)
    labels = numpy.where(random.random((ROWS, SEQ)) < 0.25, -100, ids).astype(numpy.int32)
    positions = numpy.zeros_like(ids)
    for row in range(ROWS):
        for start, end in ((0, 9 + row), (9 + row, 20), (20, SEQ)):
            positions[row, start:end] = numpy.arange(end - start)
            labels[row, start] = -100
        labels[row, 20:] = -100
        ids[row, 20:] = 0
    tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
    metadata = {"format": "slidedp.packed", "version": "1", "seq": str(SEQ), "vocabulary_size": str(vocabulary),
                "tokenizer_hash": "sha256:" + "0" * 64}
    safetensors.torch.save_file({k: torch.from_numpy(v) for k, v in tensors.items()}, file, metadata)
    return {k: torch.from_numpy(v).long() for k, v in tensors.items()}


def document_mask(position_ids):
    """Additive [rows, 1, seq, seq] mask: causal, and inside one document only."""
    document = (position_ids == 0).cumsum(1)
    seq = position_ids.shape[1]
    allowed = (document[:, :, None] == document[:, None, :]) & torch.ones(seq, seq).tril().bool()
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def loss_sum(model, batch):
    """Sum over target tokens, and their number."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"],
                   attention_mask=document_mask(batch["position_ids"]), use_cache=False).logits
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum",
                                              ignore_index=-100)
    return total, int((targets != -100).sum())


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.train()


def round_half_up(master):
    bits = master.view(torch.int32)
    return ((bits + 0x8000) & -65536).view(torch.float32)


def train(folder, batch, steps, lr, weight_decay=0.0, max_grad_norm=0.0):
    """Losses, norms of the mean gradient, L1 norms of the (clipped) mean gradient, and the first step's gradients."""
    model = load(folder)
    parameters = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    decays = lambda name: not (name.endswith("bias") or "norm" in name)
    optimizer = torch.optim.AdamW(
        [{"params": [m for n, m in masters.items() if decays(n)], "weight_decay": weight_decay},
         {"params": [m for n, m in masters.items() if not decays(n)], "weight_decay": 0.0}], lr=lr)
    losses, norms, sums, first = [], [], [], None
    for _ in range(steps):
        model.zero_grad()
        total, count = loss_sum(model, batch)
        (total / count).backward()
        losses.append((total / count).item())
        for name, master in masters.items():
            master.grad = parameters[name].grad.clone()
        if first is None:
            first = {name: master.grad.clone() for name, master in masters.items()}
        norm = torch.sqrt(sum(m.grad.double().pow(2).sum() for m in masters.values())).item()
        if max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(masters.values(), max_grad_norm)
        norms.append(norm)
        sums.append(sum(m.grad.abs().sum() for m in masters.values()).item())
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                parameters[name].copy_(round_half_up(master))
    return {"losses": losses, "norms": norms, "sums": sums, "gradients": first}


def gradients(file):
    return safetensors.torch.load_file(pathlib.Path(file))
