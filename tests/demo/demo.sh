#!/bin/sh
# demo.sh BUILD WORK: the whole loop on a real pretrained model with two CPU ranks, then checks of what came out.
# BUILD holds the programs; WORK gets all files. A second call keeps the converted model.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(cd "$1" && pwd)
python=${SLIDEDP_PYTHON:-$root/.venv/bin/python}
train=$root/configs/train/demo.yaml
# Nothing is fetched from a hub; progress bars and warnings would hide the demo's own lines.
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1
# Waiting threads sleep: where other programs run too, spinning ones would slow everything down.
export OMP_WAIT_POLICY=PASSIVE
mkdir -p "$2"
cd "$2"
begun=$(date +%s)

# Announces a part, runs it and says how long it took.
part() {
  title=$1
  shift
  started=$(date +%s)
  printf '\n== %s\n' "$title"
  "$@"
  printf '   (%d s)\n' $(($(date +%s) - started))
}

make_data() {
  "$python" "$here/make_chat_data.py" --out chat.jsonl
  "$build/slidedp-data" --tokenizer model --input chat.jsonl --seq 256 --out packed.safetensors --overwrite
}

make_plan() {
  "$build/slidedp-plan" --model model --hardware hw.yaml --train "$train" --out plan.yaml \
    --pin ranks=2 --pin threads.compute_per_rank=1
}

part "A pretrained model, as a Hugging Face directory" "$python" "$here/convert_gguf.py" --out model
part "Chat data, packed into rows of 256 tokens" make_data
part "Questions before training" "$python" "$here/answers.py" --model model --out before.json
part "Profile of this machine" "$build/slidedp-profile" --out hw.yaml --db profile.db --model model --ranks 2 --quick --overwrite
part "Plan for two ranks" make_plan
part "Training" "$build/slidedp-run" --plan plan.yaml --model model --data packed.safetensors --out run --overwrite
part "Questions after training" "$python" "$here/answers.py" --model run/hf --out after.json
part "A run that starts from the export" "$build/slidedp-run" --plan plan.yaml --model run/hf --data packed.safetensors \
  --out rerun --steps 1 --overwrite
part "The export in transformers" "$python" "$here/check_export.py" --source model --export run/hf --data packed.safetensors \
  --rows 2 --out export.json

printf '\n== Results (%d s in all; files in %s)\n' $(($(date +%s) - begun)) "$PWD"
"$python" "$here/show_results.py" --work .
