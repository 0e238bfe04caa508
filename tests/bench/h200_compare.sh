#!/usr/bin/env bash
# h200_compare.sh PEERS=DIR [NAME=VALUE ...] [OPTION ...]: SlideDP and FSDP2 with all state on the card, one after the
# other on this machine, on Qwen3-4B. Writes OUT/summary.json (numbers), OUT/table.md and OUT/compare.json anew after
# every part, so an aborted call leaves what it measured. Builds nothing; leave the machine idle meanwhile.
#
#   PEERS=DIR       folder of fsdp2_reference.py (and deepspeed_offload.py)
#   BIN=COMMAND     runs our programs: "$BIN slidedp-run ..." for a launcher (default: those in ROOT/build)
#   OUT=DIR         results (default ./h200-compare)
#   SCRATCH=DIR     checkpoints and runs (default /tmp/h200-compare); 17 GiB, with --8b 33 GiB on a disk
#   IDS=FILE.npy    real token ids, int32 (default: Zipf-distributed as FSDP2's script draws its own; it takes no ids)
#   PYTHON=PYTHON   one with torch and transformers (default python3)
#   BUDGET=SECONDS  parts that would begin later are left out (default 540)
#   PARTS=LIST      what to run (default "8 fsdp2 16 clip8 32 clip16"): rows a step, clip8 and clip16 with clipping; the
#                   options below add to it
#   PINS16=, PINS32=  pins of the plan for 16 and 32 rows, such as "waves=2 update=eager" (default: the planner's own)
#   GPU_MEMORY=SIZE budget of the plans (default: the hardware profile's)
#   CONFIG=, HARDWARE=, SEQ=   config.json, machine and tokens a row (default: Qwen3-4B, configs/hardware/h200.yaml, 4096)
#   --plan-only     predictions only: needs slidedp-plan, no GPU
#   --arrival       8 rows once more with updates first come first served
#   --zero-offload  DeepSpeed ZeRO-Offload, stage 2, 8 rows (its packages must be importable; 2 to 3 minutes)
#   --8b            Qwen3-8B, 8 rows (2 minutes; HOST_MEMORY=SIZE sets its budget, default 120GiB)
#
# About 7 minutes by default, --arrival half a minute more.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
PEERS='' BIN='' OUT=h200-compare SCRATCH=/tmp/h200-compare IDS='' PYTHON=python3 BUDGET=540 PINS16='' PINS32='' GPU_MEMORY=''
CONFIG=$root/configs/model/Qwen3-4B.json HARDWARE=$root/configs/hardware/h200.yaml SEQ=4096 HOST_MEMORY=120GiB
PARTS='8 fsdp2 16 clip8 32 clip16' plan_only=''

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
  exit 2
}
added=''
for argument in "$@"; do
  case $argument in
  PEERS=* | BIN=* | OUT=* | SCRATCH=* | IDS=* | PYTHON=* | BUDGET=* | PARTS=* | PINS16=* | PINS32=* | CONFIG=* | \
    HARDWARE=* | SEQ=* | GPU_MEMORY=* | HOST_MEMORY=*)
    printf -v "${argument%%=*}" %s "${argument#*=}" ;;
  --plan-only) plan_only=1 ;;
  --arrival) added+=' arrival' ;;
  --zero-offload) added+=' zero' ;;
  --8b) added+=' 8b' ;;
  *) usage ;;
  esac
done
PARTS=" $PARTS$added "
[ -n "$PEERS" ] || [ -n "$plan_only" ] || usage
[ -n "$plan_only" ] || [ -f "$PEERS/fsdp2_reference.py" ] || { echo "PEERS=$PEERS has no fsdp2_reference.py" >&2; exit 2; }
rm -rf "$OUT/plans" "$OUT/parts"
mkdir -p "$OUT/plans" "$OUT/parts" "$SCRATCH"
OUT=$(cd "$OUT" && pwd) SCRATCH=$(cd "$SCRATCH" && pwd)

has() { [[ $PARTS == *" $1 "* ]]; }
say() { echo "=== $1 ($SECONDS s)"; }
summary() { "$PYTHON" "$here/compare_summary.py" --out "$OUT"; }

# How to run one of our programs: a launcher may have arguments of its own.
run_program=("$root/build/slidedp-run") plan_program=("$root/build/slidedp-plan")
if [ -n "$BIN" ]; then
  read -r -a launcher <<<"$BIN"
  run_program=("${launcher[@]}" slidedp-run) plan_program=("${launcher[@]}" slidedp-plan)
fi

plan() { # CASE CONFIG TRAIN [ARGUMENTS]: SCRATCH/CASE.yaml and OUT/plans/CASE.json
  local name=$1 config=$2 train=$3
  shift 3
  rm -f "$SCRATCH/$name.yaml" # of an earlier call
  if ! "${plan_program[@]}" --model "$config" --hardware "$HARDWARE" --train "$SCRATCH/train-$train.yaml" \
    --out "$SCRATCH/$name.yaml" ${GPU_MEMORY:+--gpu-memory "$GPU_MEMORY"} \
    --json "$@" >"$OUT/plans/$name.json" 2>"$OUT/plans/$name.err"; then
    echo "{}" >"$OUT/plans/$name.json"
    echo "no plan for $name: $(cat "$OUT/plans/$name.err")"
  fi
  [ -s "$OUT/plans/$name.err" ] || rm -f "$OUT/plans/$name.err"
}

pins() { # LIST: as slidedp-plan's options, one a line
  local pin
  for pin in $1; do printf -- '--pin\n%s\n' "$pin"; done
}

plans() { # all at once
  local pins16 pins32 policy jobs=()
  mapfile -t pins16 < <(pins "$PINS16")
  mapfile -t pins32 < <(pins "$PINS32")
  plan 8 "$CONFIG" 8 &
  jobs+=("$!")
  plan 16 "$CONFIG" 16 "${pins16[@]}" &
  jobs+=("$!")
  plan 32 "$CONFIG" 32 "${pins32[@]}" &
  jobs+=("$!")
  for policy in deferred split; do
    plan "${policy}_8" "$CONFIG" 8-clip --pin "update=$policy" &
    jobs+=("$!")
    plan "${policy}_16" "$CONFIG" 16-clip --pin "update=$policy" &
    jobs+=("$!")
  done
  ! has 8b || plan 8b "$root/configs/model/Qwen3-8B.json" 8 --host-memory "$HOST_MEMORY"
  wait "${jobs[@]}"
}

part() { # SECONDS NAMES [--runs DIR] -- COMMAND...
  local limit=$1 names=$2 left=$((BUDGET - SECONDS))
  shift 2
  if [ "$left" -lt 20 ]; then
    echo "$names: left out, BUDGET=$BUDGET is spent"
    return
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  say "$names"
  "$PYTHON" "$here/compare_part.py" "$names" --parts "$OUT/parts" --limit "$limit" "$@" || echo "$names: failed"
  summary
}

# PLANS one for each of NAMES, comma-separated. Without a plan there is nothing to run.
slidedp() { # SECONDS NAMES STEPS PLANS [ARGUMENTS of slidedp-run]
  local limit=$1 names=$2 steps=$3 files='' name
  for name in ${4//,/ }; do
    [ -f "$SCRATCH/$name.yaml" ] || { echo "$names: left out, no plan for $name"; return; }
    files=$files,$SCRATCH/$name.yaml
  done
  shift 4
  rm -rf "$SCRATCH/run"
  part "$limit" "$names" --runs "$SCRATCH/run" -- "${run_program[@]}" --plans "${files#,}" --model "$SCRATCH/model" \
    --data "$SCRATCH/data.safetensors" --out "$SCRATCH/run" --steps "$steps" "$@"
  cp "$SCRATCH/run"/report*.md "$OUT/parts/" 2>/dev/null && for name in "$OUT/parts"/report*.md; do
    mv "$name" "$OUT/parts/${names%%,*}.$(basename "$name")"
  done
  rm -rf "$SCRATCH/run"
}

fsdp2() { # NAME ACCUMULATION
  part 150 "$1" -- env CUDNN=1 CLIP=0 "ACCUM=$2" "TORCHINDUCTOR_CACHE_DIR=$SCRATCH/inductor" \
    "$PYTHON" "$PEERS/fsdp2_reference.py" 4b c0 4x4096
}

say "inputs and plans"
"$PYTHON" "$here/compare_inputs.py" rows --config "$CONFIG" --seq "$SEQ" ${IDS:+--ids "$IDS"} --out "$SCRATCH"
rm -rf "$SCRATCH/model"
making=''
if [ -z "$plan_only" ] && [ "${PARTS// /}" != 8b ]; then
  "$PYTHON" "$here/compare_inputs.py" model --config "$CONFIG" --out "$SCRATCH/model" >"$OUT/parts/model.log" 2>&1 &
  making=$!
fi
plans
summary
[ -z "$plan_only" ] || { cat "$OUT/table.md"; exit 0; }
if [ -n "$making" ] && ! wait "$making"; then
  echo "the checkpoint could not be made: $(tail -3 "$OUT/parts/model.log")" >&2
  exit 1
fi

# The two systems take turns.
! has 8 || slidedp 100 slidedp_8_1 8 8
! has fsdp2 || fsdp2 fsdp2_4 1
! has 8 || slidedp 100 slidedp_8_2 8 8
! has fsdp2 || fsdp2 fsdp2_4_accumulated 2
! has 16 || slidedp 120 slidedp_16 6 16
! has clip8 || slidedp 150 slidedp_deferred_8,slidedp_split_8 6 deferred_8,split_8
! has 32 || slidedp 150 slidedp_32 4 32
! has clip16 || slidedp 150 slidedp_deferred_16,slidedp_split_16 4 deferred_16,split_16
! has arrival || slidedp 100 slidedp_arrival_8 8 8 --update-order arrival
! has zero || part 330 zero_offload_8 -- env DS_ACCELERATOR=cuda "OMP_NUM_THREADS=$(nproc)" DS_SKIP_CUDA_CHECK=1 \
  "CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}" "$PYTHON" "$PEERS/deepspeed_offload.py" --cudnn --clip 0 2:8
if has 8b; then
  say "Qwen3-8B checkpoint"
  rm -rf "$SCRATCH/model"
  "$PYTHON" "$here/compare_inputs.py" model --config "$root/configs/model/Qwen3-8B.json" --out "$SCRATCH/model" \
    >"$OUT/parts/model.log" 2>&1 || tail -3 "$OUT/parts/model.log"
  slidedp 200 slidedp_8b 6 8b --host-memory "$HOST_MEMORY"
fi
rm -rf "$SCRATCH/model"
say end
cat "$OUT/table.md" "$OUT/summary.json"
