#!/bin/bash
# Measure everything docs/bench.md shows, on one GPU:  benchmarks/h200_bench.sh OUT [SECONDS]   (480 seconds by default)
#
# OUT receives step.json and kernels.json (all cells, each with its environment), tables.md, check.json and check.md
# (the account's predictions beside the measurements) and log.txt. The parts run in the order of their weight; no cell
# starts after SECONDS. Finished cells stay in $WORK (/tmp/groundup-bench): the same command goes on where it stopped.
#
# Estimates for an H200; every command costs about 5 s and every worker process (one a size and precision) about 7 s:
#   1  eager training steps and forward passes: 60 cells, 10 processes; 16 steps of each (3 warm-up, 10 timed, memory,
#      FLOPs), of which fp32 at context 512 takes 0.08 s (small) to 1.5 s (2.7b)                          4.0 min
#   2  eager norm (12 cells), attention (20), optimizer (9), mixed precision (3)                          1.2 min
#   3  compiled bf16 steps, block by block: 15 cells, 5 processes, 6-15 s a cell                          3.0 min
#   4  what is left: compiled norm and attention, compiled fp32 steps, warm-ups 0/1/2/5, whole-model compile, TF32
# With less time, order the sizes: SIZES=small,xl; a process is stopped 100 s after its cell began.
set -uo pipefail
OUT=${1:?usage: benchmarks/h200_bench.sh OUT [SECONDS]}
LIMIT=${2:-480}
WORK=${WORK:-/tmp/groundup-bench}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" "$WORK"
SECONDS=0 # bash counts them from here

bench() { # BENCHMARK OPTIONS…: one sweep into $WORK/BENCHMARK, in what is left of the time
    local left=$((LIMIT - SECONDS - 20))
    [ "$left" -gt 5 ] || { echo "== no time left: $*" >>"$OUT/log.txt"; return; }
    echo "== at $SECONDS s: $*" >>"$OUT/log.txt"
    "$PYTHON" -m groundup.cli bench "$@" --device "${DEVICE:-cuda}" --out "$WORK/$1" --deadline-seconds "$left" \
        --time-limit 100 >/dev/null 2>>"$OUT/log.txt"
}

# Overridden in the environment to try the script on a small machine (SIZES=tiny CONTEXTS=32 DEVICE=cpu …).
sizes=${SIZES:-small,medium,large,xl,2.7b}
contexts=${CONTEXTS:-128,256,512}
longest=${contexts##*,}
norm=(--hidden "${HIDDEN:-1024,2048,4096,8192}" --rows "${ROWS:-32768}")
grid=(--d "${D:-16,32,64,128}" --context "${N:-256,1024,4096,8192,16384}" --steps 10)
quick=(--warmup 3 --steps 10)
train=(--size "$sizes" --context "$contexts" "${quick[@]}")

bench step "${train[@]}" --mode train-step,forward --precision fp32,bf16
bench norm "${norm[@]}" --implementation eager,layer_norm,rms_norm
bench attention "${grid[@]}" --implementation eager
bench optimizer --size "${SIZES:-small,medium,xl}"
bench mixed-precision
bench step "${train[@]}" --mode train-step --precision bf16 --compile "${COMPILE:-blocks}"
bench norm "${norm[@]}" --implementation "${COMPILED:-compiled}"
bench attention "${grid[@]}" --implementation "${COMPILED:-compiled}"
bench step "${train[@]}" --mode train-step --precision fp32 --compile "${COMPILE:-blocks}"
bench step --size "${SIZES:-small}" --context "$longest" --mode forward-backward --warmup 0,1,2,5
bench step --size "${SIZES:-small}" --context "$contexts" --mode train-step --precision bf16 \
    --compile "${COMPILE:-model}" "${quick[@]}"
bench norm --hidden "${HIDDEN:-1024,2048,4096,8192}" --rows "${ROWS:-50000}" --precision fp32
bench step --size "$sizes" --context "$longest" --mode train-step --precision tf32 "${quick[@]}"

# A few files carry everything home.
collect() { # FILE-STEM DIRECTORIES…
    local file=$1 found=()
    shift
    for name in "$@"; do [ -d "$WORK/$name" ] && found+=("$WORK/$name"); done
    [ ${#found[@]} -eq 0 ] || "$PYTHON" -m groundup.cli bench table "${found[@]}" --json "$OUT/$file.json" >>"$OUT/tables.md"
}
: >"$OUT/tables.md"
collect step step
collect kernels attention norm optimizer mixed-precision
[ -f "$OUT/step.json" ] && timeout 90 "$PYTHON" -m groundup.cli bench check "$OUT/step.json" --json "$OUT/check.json" >"$OUT/check.md"
echo "done after $SECONDS s" | tee -a "$OUT/log.txt"
ls -l "$OUT"
