#!/usr/bin/env python3
"""Writes the demo's chat data: unit conversions, each answered as one JSON object {"value": ..., "unit": "..."}.

The same seed gives the same file. The held-out questions (see HELD_OUT) use values that no example of the same
conversion uses.
"""
import argparse
import json
import random
from pathlib import Path

# (from, to, factor); every factor is exact in decimal.
CONVERSIONS = [
    ("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("kg", "g", 1000), ("t", "kg", 1000),
    ("h", "min", 60), ("min", "s", 60), ("l", "ml", 1000),
]
PHRASES = ["Convert {value} {source} to {target}.", "How many {target} are {value} {source}?",
           "What is {value} {source} in {target}?"]
# (conversion, value, phrase): asked before and after training, never generated.
HELD_OUT = [(0, 7, 0), (3, 12, 1), (5, 9, 2)]
VALUES = range(2, 21)


def question(conversion, value, phrase):
    source, target, _ = CONVERSIONS[conversion]
    return PHRASES[phrase].format(value=value, source=source, target=target)


def answer(conversion, value):
    _, target, factor = CONVERSIONS[conversion]
    return json.dumps({"value": value * factor, "unit": target})


def held_out_questions():
    """(question, unit of the right answer, its value)"""
    return [(question(c, v, p), CONVERSIONS[c][1], v * CONVERSIONS[c][2]) for c, v, p in HELD_OUT]


def examples(count, seed):
    held = {(c, v) for c, v, _ in HELD_OUT}
    pool = [(c, v, p) for c in range(len(CONVERSIONS)) for v in VALUES for p in range(len(PHRASES)) if (c, v) not in held]
    if count > len(pool):
        raise ValueError(f"only {len(pool)} different examples exist")
    random.Random(seed).shuffle(pool)
    return [[{"role": "user", "content": question(c, v, p)}, {"role": "assistant", "content": answer(c, v)}]
            for c, v, p in pool[:count]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    lines = [json.dumps({"messages": messages}) + "\n" for messages in examples(options.examples, options.seed)]
    options.out.write_text("".join(lines), encoding="utf-8")
    print(f"  wrote {len(lines)} conversations to {options.out}")


if __name__ == "__main__":
    main()
