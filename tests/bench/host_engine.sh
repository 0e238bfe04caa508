#!/bin/sh
# host_engine.sh --bench COMMAND --out DIR: the host engine's benchmark and torch's fused AdamW, one after the other on
# this machine. Writes DIR/host_engine.json (all numbers) and DIR/summary.json (ratios and GB/s). Builds nothing.
#
#   --bench COMMAND   runs host_engine_bench, e.g. build/tests/host_engine_bench or a launcher with arguments
#   --out DIR         made if it is not there
#   --gib N           memory each case goes through (default 4.25; under 4 the numbers say nothing about memory)
#   --threads LIST    e.g. 1,4,16 (default 1, 2, 4, ... and all cores)
#   --passes N        measured passes of each case with most threads (default 20), a sixth of them with fewer
#   --python PYTHON   one that has torch (default .venv/bin/python, else python3); none: leave torch out
#
# About 5 minutes on 16 cores and 100 GB/s of memory bandwidth with the defaults. Leave the machine idle meanwhile.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bench= out= gib=4.25 threads= passes=20
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
  --bench) bench=$2 ;;
  --out) out=$2 ;;
  --gib) gib=$2 ;;
  --threads) threads=$2 ;;
  --passes) passes=$2 ;;
  --python) python=$2 ;;
  *) usage ;;
  esac
  shift 2
done
[ -n "$bench" ] && [ -n "$out" ] || usage
mkdir -p "$out"
out=$(cd "$out" && pwd)  # a launcher may change the folder

# COMMAND is split into words on purpose.
$bench --gib "$gib" --passes "$passes" ${threads:+--threads "$threads"} \
  --benchmark_out="$out/bench.json" --benchmark_out_format=json
torch=
if [ "$python" != none ]; then
  # As many parameters and threads as the Adam that it is compared with.
  set -- $("$python" "$here/summarize.py" --bench "$out/bench.json" --print elements)
  "$python" "$here/torch_adam.py" --elements "$1" --threads "$2" --passes "$passes" --out "$out/torch.json"
  torch=$out/torch.json
else
  python=python3
fi
"$python" "$here/summarize.py" --bench "$out/bench.json" ${torch:+--torch "$torch"} --out "$out"
rm -f "$out/bench.json" "$out/torch.json"
cat "$out/summary.json"
