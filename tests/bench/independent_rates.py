"""Rates of this machine by PyTorch alone, for a look at slidedp-profile's from outside: copies from pinned memory, host
memory, matrix products in bf16. Prints one JSON object; GB/s are 1e9 bytes/s.

    independent_rates.py [--gib N] [--seconds S] [--window S]

Copies move 64 MiB at a time and are timed by events after each; of both directions at once it is the sum of their rates
while both run. Host memory counts bytes as STREAM does: copy 2, triad 3, in place 2 times the array. It is measured in
two ways: one thread per core, tied to it, each working piece by piece on arrays of its own (the sum of their rates in a
window in which all run: what the profile's probes measure), and, with `_one_call`, by one operation that PyTorch spreads
over all cores, which is done when the slowest core is. Matrix products run for S seconds each on normal values, since
the power limit decides and zeros run faster; the rate is that of the second half.
"""

import argparse
import json
import os
import statistics
import threading
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for large tensors, as the training state has them

import numpy
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


def rate_together(curves):
    """Sum of the rates, while all run, of those who had done `amounts` at `times`."""
    begin = max(times[0] for times, _ in curves)
    end = min(times[-1] for times, _ in curves)
    done = [numpy.interp([begin, end], times, amounts) for times, amounts in curves]
    return sum(last - first for first, last in done) / (end - begin)


def run_threads(works, piece_bytes, window):
    """Each core calls its own works in turn for about `window` seconds; GB/s of all. PyTorch lets go of the interpreter's
    lock during a call, and calls of milliseconds hide what Python takes between them."""
    curves, stop, cores = [], threading.Event(), sorted(os.sched_getaffinity(0))
    ready = threading.Barrier(len(cores) + 1, timeout=60)  # broken, and with it the program, where a thread fails

    def loop(core, mine, first):
        os.sched_setaffinity(0, {core})  # of this thread
        torch.set_num_threads(1)
        mine[first]()
        ready.wait()
        times = [time.perf_counter()]
        stopped = False
        while not stopped:
            stopped = stop.is_set()  # before the call, so that the last point comes after the stop
            mine[(first + len(times)) % len(mine)]()
            times.append(time.perf_counter())
        curves.append((times, [piece_bytes * i for i in range(len(times))]))

    # They begin at different places of their arrays, so that none is a power of two away from another for long.
    threads = [threading.Thread(target=loop, args=(core, mine, int(i * 0.618 % 1 * len(mine))))
               for i, (core, mine) in enumerate(zip(cores, works))]
    for thread in threads:
        thread.start()
    ready.wait()
    time.sleep(window)
    stop.set()
    for thread in threads:
        thread.join()
    if len(curves) < len(cores):
        raise SystemExit("A thread failed, see above: the others' rates are not those of all cores.")
    return 1e-9 * rate_together(curves)


def host_rates(gib, window):
    threads = torch.get_num_threads()
    count = int(gib * 2**30) // 4
    # None lies at the same place of its page as another.
    a, b, c = (torch.full((count + 272 * i,), 0.5)[272 * i:] for i in range(3))
    operations = {"copy": (8, lambda a, b, c: a.copy_(b)), "triad": (12, lambda a, b, c: torch.add(b, c, alpha=3.0, out=a)),
                  "in_place": (8, lambda a, b, c: a.mul_(-1.0))}
    found = {}
    cores = len(os.sched_getaffinity(0))
    share = count // cores
    piece = min(2 << 20, share)
    for name, (size, operation) in operations.items():
        works = [[lambda parts=[x[at:at + piece] for x in (a, b, c)], operation=operation: operation(*parts)
                  for at in range(i * share, (i + 1) * share - piece + 1, piece)] for i in range(cores)]
        found[f"dram_{name}_gbps"] = run_threads(works, size * piece, window)
    torch.set_num_threads(threads)
    for name, (size, operation) in operations.items():
        found[f"dram_{name}_one_call_gbps"] = 1e-9 * size * count / seconds(lambda: operation(a, b, c), 8)
    return found


def copy_rates():
    size, pieces = 64 << 20, 32  # 2 GiB a direction: more than caches hold
    host = [torch.empty(pieces, size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def h2d(i):
        device[0].copy_(host[0][i], non_blocking=True)

    def d2h(i):
        host[1][i].copy_(device[1], non_blocking=True)

    def rate(copies):
        torch.cuda.synchronize()
        origin = torch.cuda.Event(enable_timing=True)
        origin.record()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(pieces + 1)] for _ in copies]
        for i in range(pieces + 1):  # in turn, so that both streams have work from the first moment
            for copy, stream, events in zip(copies, streams, marks):
                with torch.cuda.stream(stream):
                    if i > 0:
                        copy(i - 1)
                    events[i].record()
        torch.cuda.synchronize()
        amounts = [size * i for i in range(pieces + 1)]
        return 1e-9 * rate_together([([1e-3 * origin.elapsed_time(event) for event in events], amounts)
                                     for events in marks])

    def typical(*copies):
        return statistics.median([rate(copies) for _ in range(9)][1:])

    return {"h2d_gbps": typical(h2d), "d2h_gbps": typical(d2h), "duplex_gbps": typical(h2d, d2h)}


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
    parser.add_argument("--window", type=float, default=2.0, help="seconds for each operation in host memory")
    options = parser.parse_args()
    found = host_rates(options.gib, options.window)
    if torch.cuda.is_available():
        found |= copy_rates()
        found |= {f"product_{name}_tflops": product_rate(*shape, options.seconds) for name, shape in PRODUCTS.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
