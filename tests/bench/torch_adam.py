"""torch.optim.AdamW(fused=True) on CPU over as many parameters as the host engine's benchmark updates, with and without
the copy of the fp32 weights to bf16 that training needs. Writes JSON."""
import argparse
import json
import os
import statistics
import time


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def measure(passes, work):
    """Seconds of each pass, after one that is not counted."""
    work()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def main():
    args = parse()
    # The same conditions as the benchmark's: a core for each thread, huge pages. Read when torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import torch

    torch.set_num_threads(args.threads)
    tensors = 16
    size = max(args.elements // tensors, 1)
    weights = [torch.full((size,), 0.0115, requires_grad=True) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.full((size,), 1.15e-5)
    narrow = [torch.empty(size, dtype=torch.bfloat16) for _ in range(tensors)]
    adam = torch.optim.AdamW(weights, lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=True)

    def copy():
        with torch.no_grad():
            for to, weight in zip(narrow, weights):
                to.copy_(weight)

    def step_and_copy():
        adam.step()
        copy()

    elements = tensors * size
    result = {"torch": torch.__version__, "threads": args.threads, "elements": elements}
    for name, work in (("step", adam.step), ("step_with_copy", step_and_copy)):
        seconds = measure(args.passes, work)
        result[name] = {"seconds": seconds, "elements_per_s": elements / statistics.median(seconds)}
    # 28 bytes an element: reads and writes p, m and v, reads the gradient.
    result["step"]["gbps"] = result["step"]["elements_per_s"] * 28 / 1e9
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
