#!/usr/bin/env python3
"""Asks a model the demo's held-out questions (transformers' generate, greedy) and judges the form of the answers."""
import argparse
import json
from pathlib import Path

from make_chat_data import held_out_questions

NEW_TOKENS = 32


def judge(answer, unit):
    """(parses as JSON with the taught keys, has the right unit)"""
    try:
        value = json.loads(answer)
    except ValueError:
        return False, False
    parses = isinstance(value, dict) and set(value) == {"value", "unit"}
    return parses, parses and value["unit"] == unit


def ask(model, tokenizer, question):
    import torch

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with questions, answers and judgements")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # fp32 arithmetic on the bf16 weights, as CPU ranks compute.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    results = []
    for question, unit, _ in held_out_questions():
        answer = ask(model, tokenizer, question)
        parses, right_unit = judge(answer, unit)
        results.append({"question": question, "answer": answer, "parses": parses, "right_unit": right_unit})
        print(f"  {question} -> {answer}")
    options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
