#!/usr/bin/env bash
# Everything that is checked on a GPU machine, with one summary.
#
#   gpu_acceptance.sh LAUNCHER OUT [PART...]
#
# `LAUNCHER PROGRAM ARGUMENTS` runs a built program (tests, loop_probe, slidedp-plan, slidedp-run). Parts: sanitizer
# tests parity routes memory (all by default). Environment: IDS, a .npy file with token ids of text (default: bytes of a
# text file); HARDWARE, the hardware profile (default: configs/hardware/h200.yaml). Writes OUT/summary.json, the parts'
# JSON files, and their logs in OUT/logs.tar.gz. No part's failure or hang stops the others; the exit code says whether
# every part that was asked for was met.
set -u
launcher=${1:?usage: gpu_acceptance.sh LAUNCHER OUT [PART...]}
out=${2:?usage: gpu_acceptance.sh LAUNCHER OUT [PART...]}
shift 2
parts=" ${*:-sanitizer tests parity routes memory} "
here=$(cd "$(dirname "$0")" && pwd)
hardware=${HARDWARE:-$here/../../configs/hardware/h200.yaml}
python=${SLIDEDP_PYTHON:-python3}
text=(); [ -n "${IDS:-}" ] && text=(--ids "$IDS")
work=$(mktemp -d); logs=$work/logs
mkdir -p "$out" "$logs"
trap 'rm -rf "$work"' EXIT
export SLIDEDP_REQUIRE_GPU=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

wanted() { [[ $parts == *" $1 "* ]]; }

# timed NAME SECONDS COMMAND...: runs it with its log; the exit code goes to NAME.rc.
timed() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$logs/$name.log" 2>&1
  echo $? > "$logs/$name.rc"
  echo "$name: exit code $(cat "$logs/$name.rc"), $((SECONDS - begin)) s"
}

gtests() {
  timed device 150 "$launcher" runtime_device_cuda_test
  timed nn 150 "$launcher" runtime_nn_cuda_test
}

# check NAME TOOL PROGRAM...: one run of compute-sanitizer over our kernels; the references that the kernel tests
# compare with are ATen's. A tool that does not know the filter runs without it.
check() {
  local name=$1 tool=$2
  shift 2
  timed "$name" 200 "$sanitizer" --tool "$tool" --target-processes all --kernel-name kernel_substring=slidedp "$@"
  [ "$(cat "$logs/$name.rc")" != 124 ] && ! grep -q SUMMARY "$logs/$name.log" || return 0
  timed "$name" 150 "$sanitizer" --tool "$tool" --target-processes all "$@"
}

# The runs side by side: the tool leaves most of the GPU idle. The training step is checked with all its kernels.
sanitizer() {
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null) || return 0
  local data=$work/tiny.data
  "$python" - "$here" "$work/tiny" "$data" <<'PYTHON' > "$logs/tiny.log" 2>&1
import sys
sys.path.insert(0, sys.argv[1])
import gpu_models
gpu_models.make_checkpoint("tiny", sys.argv[2])
ids = gpu_models.numpy.arange(1000, dtype="int32") * 7 % 512
gpu_models.make_rows(ids, 512, 8, 128, True, sys.argv[3])
PYTHON
  check memcheck_kernels memcheck "$launcher" runtime_nn_cuda_test --gtest_filter='*Kernel*' &
  check racecheck racecheck "$launcher" runtime_nn_cuda_test --gtest_filter='*Kernel*' &
  timed memcheck_step 200 "$sanitizer" --tool memcheck --target-processes all "$launcher" loop_probe \
    --model "$work/tiny" --data "$data" --seq 128 --rows 4 --steps 2 --backend cuda --activation selective,offload \
    --vocabulary-rows touched --chunk 100000 &
  wait
}

parity() {
  timed parity 280 "$python" "$here/gpu_parity.py" --probe "$launcher loop_probe" --work "$work/parity" \
    --out "$out/parity.json" "${text[@]}"
}

routes() {
  timed routes 150 "$python" "$here/gpu_routes.py" --probe "$launcher loop_probe" --work "$work/routes" \
    --out "$out/routes.json" "${text[@]}"
}

memory() {
  timed memory 300 "$python" "$here/gpu_memory.py" --seconds 270 --plan "$launcher slidedp-plan" --run "$launcher slidedp-run" \
    --hardware "$hardware" --work "$work/memory" --out "$out/memory.json" "${text[@]}"
}

summary() {
  tar czf "$out/logs.tar.gz" -C "$work" logs
  "$python" - "$out" "$logs" $parts <<'PYTHON'
import json, pathlib, re, sys
out, logs, parts = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
text = lambda name: (logs / f"{name}.log").read_text(errors="replace") if (logs / f"{name}.log").exists() else ""
code = lambda name: int((logs / f"{name}.rc").read_text()) if (logs / f"{name}.rc").exists() else None
summary, met = {}, []
if "tests" in parts:
    count = lambda word: sum(int(n) for name in ("device", "nn")
                             for n in re.findall(rf"^\[  {word}  ?\] (\d+) tests?[.,]", text(name), re.M))
    summary |= {"gpu_tests_passed": count("PASSED"), "gpu_tests_failed": count("FAILED"),
                "gpu_tests_skipped": count("SKIPPED")}
    met.append(code("device") == 0 and code("nn") == 0)
if "sanitizer" in parts:
    names, total = ("memcheck_kernels", "memcheck_step", "racecheck"), 0
    for name in names:
        errors = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text(name))]
        errors += [int(n) for n in re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text(name))]
        summary[f"sanitizer_{name}_errors"] = sum(errors) if errors else None
        summary[f"sanitizer_{name}_finished"] = code(name) == 0
        total = None if total is None or not errors else total + sum(errors)
    summary["sanitizer_errors"] = total  # null: a run has no result (no tool, refused, or too slow)
    met.append(total == 0)
def part(name, keys):
    if name not in parts:
        return {}
    file = out / f"{name}.json"
    met.append(code(name) == 0)
    found = json.loads(file.read_text()) if file.exists() else {}
    return {f"{name}_passed": code(name) == 0} | keys(found)
numbers = lambda found, key: [case[key] for case in found.values() if key in case]
summary |= part("parity", lambda found: {
    "parity_cases": len(found), "parity_cases_failed": sum(not case["passed"] for case in found.values()),
    "parity_loss_difference_max": max(numbers(found, "loss_largest_difference"), default=None),
    "parity_loss_excess_max": max(numbers(found, "loss_excess"), default=None),
    "parity_gradient_ratio_max": max(numbers(found, "gradient_ratio_max"), default=None)})
summary |= part("routes", lambda found: {
    "routes_runs": found.get("runs"), "routes_failed": found.get("failed"),
    "routes_first_loss_difference_max": found.get("first_difference_max"),
    "routes_later_loss_difference_max": found.get("later_difference_max"),
    "deterministic_step_time_ratio": found.get("deterministic_cost", {}).get("ratio")})
summary |= part("memory", lambda found: {
    key: found.get(key) for key in ("memory_over_plan_min", "memory_over_plan_max", "memory_over_profile_plan_max")} | {
    "memory_plans": found.get("plans"), "memory_plans_failed": found.get("failed"),
    "context_bytes": found.get("context_bytes")})
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
print(json.dumps(summary, indent=1))
sys.exit(0 if all(met) else 1)
PYTHON
}

# Tests, parity and the sanitizer share the GPU; step times and memory are measured with nothing beside them.
wanted sanitizer && sanitizer &
wanted tests && gtests
wanted parity && parity
wait
wanted routes && routes
wanted memory && memory
summary
