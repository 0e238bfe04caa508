"""Losses and gradients of tiny transformers models, for tests/runtime/nn/parity_test.cpp to compare with.

    nn_reference.py OUT

writes one folder a model: config.json, batch.bin (int32: ids, targets, positions), starts.bin (int32 document starts),
TENSOR.weight.bin (bf16), TENSOR.gradient.bin (fp32), result.json (sum of losses; isolation.*).

Weights are bf16 values held in fp32, all computation is fp32. Documents are kept apart by an explicit 4-D block-diagonal
causal mask: with a 2-D mask or none, transformers isolates packed documents only under further conditions. isolation.*
proves it: the loss of document 2 after document 1's tokens were changed, with that mask and with a causal mask only.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

ROWS, SEQ = 2, 40
DOCUMENTS = [(0, 15), (15, 40), (40, 80)]  # no document crosses a row
COMMON = dict(
    vocab_size=211, hidden_size=64, intermediate_size=136, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, attention_dropout=0.0,
    use_cache=False, tie_word_embeddings=False)


def llama3_rope():
    return dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32)


CONFIGS = {
    "llama": LlamaConfig(**COMMON, rms_norm_eps=1e-5),
    "llama3_rope": LlamaConfig(**COMMON, rope_parameters=llama3_rope(), attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**{**COMMON, "tie_word_embeddings": True}, head_dim=24),
}


def make_model(config, seed):
    torch.manual_seed(seed)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                             "qwen3": "Qwen3ForCausalLM"}[config.model_type]]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts them at one and zero
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def make_batch(vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (ROWS * SEQ,), generator=generator)
    targets = torch.full((ROWS * SEQ,), -100)
    positions = torch.empty(ROWS * SEQ, dtype=torch.int64)
    for begin, end in DOCUMENTS:
        positions[begin:end] = torch.arange(end - begin)
        targets[begin:end - 1] = ids[begin + 1:end]  # a document's first token is nobody's target
    targets[4:9] = -100
    return ids, targets, positions


def block_causal_mask(isolate):
    document = torch.empty(ROWS * SEQ, dtype=torch.int64)
    for index, (begin, end) in enumerate(DOCUMENTS):
        document[begin:end] = index
    document = document.view(ROWS, SEQ)
    visible = torch.ones(SEQ, SEQ, dtype=torch.bool).tril().expand(ROWS, SEQ, SEQ)
    if isolate:
        visible = visible & (document[:, :, None] == document[:, None, :])
    mask = torch.zeros(ROWS, 1, SEQ, SEQ)
    return mask.masked_fill(~visible[:, None], torch.finfo(torch.float32).min)


def token_losses(model, ids, targets, positions, isolate=True):
    logits = model(input_ids=ids.view(ROWS, SEQ), position_ids=positions.view(ROWS, SEQ),
                   attention_mask=block_causal_mask(isolate), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.view(ROWS * SEQ, -1), targets, ignore_index=-100,
                                             reduction="none")


def isolation(model, ids, targets, positions):
    begin, end = DOCUMENTS[1]
    changed = ids.clone()
    changed[:DOCUMENTS[0][1]] = (changed[:DOCUMENTS[0][1]] + 1) % model.config.vocab_size

    def loss(tokens, isolate):
        with torch.no_grad():
            return token_losses(model, tokens, targets, positions, isolate)[begin:end].double().sum().item()

    return {"plain": loss(ids, True), "changed": loss(changed, True),
            "causal_plain": loss(ids, False), "causal_changed": loss(changed, False)}


def write(path, tensor):
    path.write_bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def dump(name, config, out):
    model = make_model(config, seed=len(name))
    ids, targets, positions = make_batch(config.vocab_size, seed=3)
    losses = token_losses(model, ids, targets, positions)
    losses.sum().backward()
    out.mkdir(parents=True, exist_ok=True)
    config.to_json_file(out / "config.json", use_diff=False)
    write(out / "batch.bin", torch.stack([ids, targets, positions]).to(torch.int32))
    write(out / "starts.bin", torch.tensor([begin for begin, _ in DOCUMENTS], dtype=torch.int32))
    for tensor, parameter in model.named_parameters():
        write(out / f"{tensor}.weight.bin", parameter.to(torch.bfloat16))
        write(out / f"{tensor}.gradient.bin", parameter.grad)
    (out / "result.json").write_text(json.dumps(
        {"rows": ROWS, "seq": SEQ, "loss": losses.double().sum().item(),
         "isolation": isolation(model, ids, targets, positions)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model_name, model_config in CONFIGS.items():
        dump(model_name, model_config, pathlib.Path(sys.argv[1]) / model_name)
