"""Rates of this machine by PyTorch alone, for a look at slidedp-profile's from outside: copies from pinned memory, host
memory, matrix products in bf16. Prints one JSON object; GB/s are 1e9 bytes/s.

    independent_rates.py [--gib N] [--seconds S]

Copies move 256 MiB (one direction: by events; both: time from the first start to the last end). Host memory counts
bytes as STREAM does: copy 2, triad 3, in place 2 times the array. Matrix products run for S seconds each on normal values,
since the power limit decides and zeros run faster; the rate is that of the second half.
"""

import argparse
import json
import statistics
import time

import torch

PRODUCTS = {"gate_up": (32768, 2560, 19456), "down": (32768, 9728, 2560), "qkv": (32768, 2560, 6144),
            "logits": (4096, 2560, 151936)}


def seconds(work, repeats):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def host_rates(gib):
    count = int(gib * 2**30) // 4
    a, b, c = (torch.full((count,), 0.5) for _ in range(3))
    size = 4e-9 * count
    return {"dram_copy_gbps": 2 * size / seconds(lambda: a.copy_(b), 8),
            "dram_triad_gbps": 3 * size / seconds(lambda: torch.add(b, c, alpha=3.0, out=a), 8),
            "dram_in_place_gbps": 2 * size / seconds(lambda: a.mul_(0.999), 8)}


def copy_rates():
    size = 256 << 20
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copies(h2d, d2h):
        def work():
            for _ in range(4):
                with torch.cuda.stream(streams[0]):
                    if h2d:
                        device[0].copy_(host[0], non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    if d2h:
                        host[1].copy_(device[1], non_blocking=True)
            torch.cuda.synchronize()
        return 4 * (h2d + d2h) * size * 1e-9 / seconds(work, 9)

    return {"h2d_gbps": copies(1, 0), "d2h_gbps": copies(0, 1), "duplex_gbps": copies(1, 1)}


def product_rate(rows, inner, columns, limit):
    a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    b = 0.02 * torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    flops, done = 2.0 * rows * inner * columns, []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while time.perf_counter() - begin < limit:
        for _ in range(8):
            torch.mm(a, b.t(), out=out)
        torch.cuda.synchronize()
        done.append(time.perf_counter())
    half = len(done) // 2
    return 8 * (len(done) - 1 - half) * flops / (done[-1] - done[half]) * 1e-12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="of each of three arrays in host memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each matrix product")
    options = parser.parse_args()
    found = host_rates(options.gib)
    if torch.cuda.is_available():
        found |= copy_rates()
        found |= {f"product_{name}_tflops": product_rate(*shape, options.seconds) for name, shape in PRODUCTS.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
