"""Every route, activation policy, update policy and wave on a GPU, against one rank with the same global batch.

    gpu_routes.py --probe COMMAND --work DIR --out routes.json

COMMAND starts loop_probe. Ranks share the first GPU. Every run uses fp32 on the wire and in the accumulators.

With --deterministic runs that the design promises to be the same must have the same bits in every loss and in the
trained weights: any chunk, delivery, activation policy, update policy (without clipping), rows of the vocabulary that
are delivered, and the same plan twice. Rank count, reduction, micro-batches and waves change the order of sums and the
shapes of matrix products, and with them the last bit of bf16 activations (a share of 2^-9 each). Over the thousands of
tokens of a batch such errors average out in the first loss: 1e-4 of it is allowed. Later losses also differ by what
Adam makes of them: its first steps move a weight by the learning rate whatever its gradient's size, so a gradient near
zero whose sign flips moves it the other way: 1e-3. The same bounds hold without --deterministic, where attention's
gradients differ from call to call.
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys

import gpu_models

ROWS, SEQ, STEPS = 8, 256, 5
FIRST_BOUND, LATER_BOUND = 1e-4, 1e-3
ROUTES = [(delivery, reduction) for delivery in ("replicated", "sharded", "broadcast") for reduction in ("cpu", "gpu")]
POLICIES = ("keep", "selective", "recompute", "offload")


def cases():
    """name -> (group of equal bits, or none, and loop_probe's options)."""
    one = {"--activation": "keep", "--chunk": 1 << 18}
    found = {"reference": ("one rank", one), "same plan again": ("one rank", one)}
    for chunk in (3000, 1 << 16):
        found[f"chunk {chunk}"] = ("one rank", one | {"--chunk": chunk})
    for policy in (*POLICIES[1:], ",".join(POLICIES)):
        found[policy] = ("one rank", one | {"--activation": policy})
    for update in ("deferred", "split"):
        found[update] = ("one rank", one | {"--update": update})
    found["touched rows"] = ("one rank", one | {"--vocabulary-rows": "touched"})
    found["vocabulary kept"] = ("one rank", one | {"--vocabulary-kept": None})
    for update in ("eager", "deferred", "split"):
        found[f"2 waves, {update}"] = ("2 waves", one | {"--waves": 2, "--update": update})
    found["2 micro-batches"] = (None, one | {"--micro-batches": 2})
    for ranks in (2, 4):
        for delivery, reduction in ROUTES:
            options = {"--ranks": ranks, "--delivery": delivery, "--reduction": reduction,
                       "--activation": ",".join(POLICIES)}
            found[f"{ranks} ranks, {delivery} x {reduction}"] = (f"{ranks} ranks, {reduction}", one | options)
    found["2 ranks, sharded x gpu, deferred, touched rows"] = (
        "2 ranks, gpu", one | {"--ranks": 2, "--delivery": "sharded", "--reduction": "gpu", "--update": "deferred",
                               "--vocabulary-rows": "touched"})
    found["2 ranks, 2 waves, 2 micro-batches"] = (None, one | {"--ranks": 2, "--waves": 2, "--micro-batches": 2})
    return found


def probe(options, folder, file, settings, deterministic, threads, steps=STEPS, rows=ROWS, seq=SEQ):
    command = [options.probe, "--model", folder, "--data", file, "--seq", seq, "--rows", rows, "--steps", steps,
               "--lr", 1e-4, "--backend", options.backend, "--head-chunk", 4096, "--update-threads", threads,
               "--share-gpu", "--digest"]
    command += ["--deterministic"] if deterministic else []
    for option, value in settings.items():
        command += [option] if value is None else [option, value]
    return json.loads(gpu_models.run(command))


def difference(got, want):
    """Largest relative differences: of the first loss, of the later ones."""
    shares = [abs(a - b) / b for a, b in zip(got["losses"], want["losses"], strict=True)]
    return shares[0], max(shares[1:])


def judge(name, group, run, runs):
    """What is wrong with this run, or nothing."""
    if "error" in run:
        return [run["error"]]
    reference = runs["reference"]
    if "error" in reference:
        return ["the reference failed"]
    first, later = difference(run, reference)
    run["first_difference"], run["later_difference"] = first, later
    problems = []
    if not first <= FIRST_BOUND or not later <= LATER_BOUND:  # also when not a number
        problems.append(f"losses differ from one rank's by {first:.1e} and {later:.1e}")
    leader = next((other for other in runs.values() if other["group"] == group and "error" not in other), run)
    if run["deterministic"] and group is not None:
        run["same_bits"] = run["losses"] == leader["losses"] and run["digest"] == leader["digest"]
        if not run["same_bits"]:
            problems.append(f"other bits than the first of '{group}'")
    return problems


def run_cases(options, folder, file):
    planned = {name: (group, settings, True) for name, (group, settings) in cases().items()}
    for name in ("reference", "2 ranks, sharded x gpu", "4 ranks, replicated x cpu", ",".join(POLICIES)):
        planned[f"{name}, default mode"] = (None, cases()[name][1], False)

    def run(item):
        name, (group, settings, deterministic) = item
        result = {"group": group, "deterministic": deterministic}
        try:
            return name, result | probe(options, folder, file, settings, deterministic, options.threads)
        except Exception as error:  # one run's failure must not hide the others' results
            return name, result | {"error": str(error)}

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        return dict(pool.map(run, planned.items()))


def deterministic_cost(options, work):
    """Median step time with --deterministic over that without; the first two steps are warm-up."""
    folder = gpu_models.make_checkpoint(options.cost_model, work / options.cost_model)
    vocabulary = gpu_models.SHAPES[options.cost_model]["vocab_size"]
    rows, seq, steps = 8, options.cost_seq, 7
    file = work / "cost.safetensors"
    gpu_models.make_rows(gpu_models.text_ids(options, vocabulary), vocabulary, rows, seq, False, file)
    settings = {"--activation": "keep", "--chunk": 1 << 20, "--wire": "bf16", "--accumulator": "bf16"}
    median = {}
    for deterministic in (False, True):
        threads = options.jobs * options.threads  # this run is the only one
        found = probe(options, folder, file, settings, deterministic, threads, steps, rows, seq)
        median[deterministic] = statistics.median(found["step_s"][2:])
    return {"model": options.cost_model, "rows": rows, "seq": seq, "step_s": median[False],
            "deterministic_step_s": median[True], "ratio": median[True] / median[False]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", required=True)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--backend", default="cuda", help="cpu: the same runs on CPU ranks")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--threads", type=int, default=3, help="update threads of a run")
    parser.add_argument("--cost-model", default="SmolLM2-135M", help="its step time with and without --deterministic")
    parser.add_argument("--cost-seq", type=int, default=1024)
    gpu_models.add_text_options(parser)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = gpu_models.make_checkpoint("small", options.work / "small")
    vocabulary = gpu_models.SHAPES["small"]["vocab_size"]
    file = options.work / "rows.safetensors"
    gpu_models.make_rows(gpu_models.text_ids(options, vocabulary), vocabulary, STEPS * ROWS, SEQ, True, file)
    runs = run_cases(options, folder, file)
    failed = 0
    for name, run in runs.items():
        run["problems"] = judge(name, run["group"], run, runs)
        failed += bool(run["problems"])
        print(name, "; ".join(run["problems"]) or "ok",
              *(f"{key} {run[key]}" for key in ("first_difference", "later_difference", "same_bits") if key in run))
    good = [run for run in runs.values() if "first_difference" in run]
    result = {"runs": len(runs), "failed": failed,
              "first_difference_max": max((run["first_difference"] for run in good), default=None),
              "later_difference_max": max((run["later_difference"] for run in good), default=None),
              "same_bits": sum(run.get("same_bits", False) for run in runs.values()), "cases": runs}
    options.out.write_text(json.dumps(result, indent=1))
    try:
        result["deterministic_cost"] = deterministic_cost(options, options.work)
    except Exception as error:  # what was found so far stays
        result["deterministic_cost"] = {"error": str(error)}
        failed += 1
    print(result["deterministic_cost"])
    options.out.write_text(json.dumps(result, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
