#!/usr/bin/env bash
# The GPU benchmark in one command: correctness on real hardware, then kernels, then engines.
#
#   benchmarks/gpu/run.sh          on a machine with a CUDA GPU; at most 9 minutes, no network
#   benchmarks/gpu/run.sh --dry    every script with tiny shapes on the CPU, to prove that they run
#
# Results: gpu-STAGE.json for each stage and gpu-summary.md, in $OUT, or in benchmarks/results/ (a dry run:
# in a new folder under /tmp). A stage that fails is recorded and does not stop the next. The exit status is
# 0 if no stage failed or timed out.
#
# PYTHON picks the interpreter; otherwise that of .venv, if there is one, or python3.
# COMMIT names the code that runs where there is no git.
set -uo pipefail

dry=()
case "${1:-}" in
    --dry) dry=(--dry) ;;
    "") ;;
    *) echo "usage: $0 [--dry]" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$root/.venv/bin/python" ] && PYTHON="$root/.venv/bin/python"
fi
case "$PYTHON" in  # a path must survive the change of folder below
    */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;;
esac
if [ -z "${OUT:-}" ]; then
    OUT="$root/benchmarks/results"
    [ ${#dry[@]} -gt 0 ] && OUT=$(mktemp -d "${TMPDIR:-/tmp}/vattn-gpu-dry.XXXXXX")
fi
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
work=$(mktemp -d "${TMPDIR:-/tmp}/vattn-gpu.XXXXXX") || exit 2
trap 'rm -rf "$work"' EXIT
# `timeout` puts a stage into a process group of its own, where Ctrl-C does not reach it.
trap '[ -s "$work/pid" ] && kill "$(cat "$work/pid")" 2>/dev/null; exit 130' INT TERM

# Scripts run as modules from the repository root, which makes `vattn` importable whether or not it is installed.
cd "$root" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
needs="torch triton transformers numpy typer rich"
missing=$("$PYTHON" -c 'import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if not u.find_spec(n)))' $needs) || {
    echo "$PYTHON does not run; PYTHON=... picks another interpreter" >&2; exit 2; }
[ -z "$missing" ] || { echo "$PYTHON lacks: $missing; PYTHON=... picks another interpreter" >&2; exit 2; }
[ ${#dry[@]} -gt 0 ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "torch in $PYTHON sees no CUDA device; $0 --dry runs all of this on the CPU" >&2; exit 2; }

# Seconds of each stage at most; with the summary's they sum to 535.
#        stage        real  dry
limits=( machine        25   60
         conformance    45   60
         tests          85   60
         sanitizer      45   60
         vmm            30   60
         kernels       110   90
         engine        185   60 )
summary_limit=10
total=540
limit_of() {  # STAGE -> its seconds
    local i
    for ((i = 0; i < ${#limits[@]}; i += 3)); do
        [ "${limits[i]}" = "$1" ] && echo "${limits[i + 1 + (${#dry[@]} > 0)]}"
    done
}

failures=0
names=()

# stage NAME COMMAND...: run within the stage's limit, print and log, record. In the command {} stands for its JSON
# file, and {budget} for the seconds after which a benchmark should stop by itself, so that it can still write.
stage() {
    local name=$1 limit code=-1 began=0 ended=0 left; shift
    local result="$work/$name.json" log="$work/$name.log"
    names+=("$name")
    limit=$(limit_of "$name")
    left=$((total - summary_limit - SECONDS))
    if [ ${#dry[@]} -eq 0 ] && [ "$limit" -gt "$left" ]; then limit=$left; fi
    local command=("${@//\{\}/$result}")
    command=("${command[@]//\{budget\}/$((limit - 15))}")
    echo; echo "== $name, at most $limit s"
    if [ "$limit" -gt 0 ]; then
        began=${EPOCHREALTIME/,/.}
        {
            timeout --kill-after=5 "$limit" "${command[@]}" &
            echo $! >"$work/pid"
            wait $!
            { echo $? >"$work/code"; } 2>/dev/null  # after Ctrl-C the folder is gone
        } 2>&1 | tee "$log" &
        wait $!
        ended=${EPOCHREALTIME/,/.}
        code=$(<"$work/code")
        : >"$work/pid"
    fi
    "$PYTHON" -m benchmarks.gpu.record "$name" --code="$code" --limit="$limit" --log "$log" --result "$result" \
        --began="$began" --ended="$ended" --out "$OUT" --command="$*" "${dry[@]}"
    [ "$code" -eq 0 ] || failures=$((failures + 1))
}

device=cuda
smoke=()
if [ ${#dry[@]} -gt 0 ]; then
    device=cpu
    smoke=(--smoke)
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
fi
# Whether kernels are interpreted is settled when Triton is imported: for a whole process.
unset TRITON_INTERPRET
interpreted=(env)
[ ${#dry[@]} -gt 0 ] && interpreted=(env TRITON_INTERPRET=1)
py=("$PYTHON" -m)
gpu=benchmarks.gpu

rm -f "$OUT"/gpu-{machine,conformance,tests,sanitizer,vmm,kernels,engine}.json "$OUT/gpu-summary.md"
stage machine     "${py[@]}" $gpu.machine --json {} "${dry[@]}"
stage conformance "${py[@]}" vattn.cli vmm test --device $device --json {}
stage tests       "${interpreted[@]}" "${py[@]}" $gpu.hardware_tests --json {} --budget-s {budget} "${dry[@]}"
stage sanitizer   "${py[@]}" $gpu.sanitizer --json {} "${dry[@]}"
stage vmm         "${py[@]}" vattn.cli vmm bench --device $device --json {} "${smoke[@]}"
stage kernels     "${interpreted[@]}" "${py[@]}" $gpu.survive $gpu.kernels --json {} --budget-s {budget} "${dry[@]}"
stage engine      "${py[@]}" $gpu.survive $gpu.engine --json {} --budget-s {budget} "${dry[@]}"

echo
timeout "$((summary_limit + 20 * (${#dry[@]} > 0)))" "${py[@]}" $gpu.summary --out "$OUT" "${names[@]}" || failures=$((failures + 1))
echo "$((SECONDS)) s in all; results in $OUT"
[ "$failures" -eq 0 ]
