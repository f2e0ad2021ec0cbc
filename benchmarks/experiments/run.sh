#!/usr/bin/env bash
# Record all experiments anew: about fifteen minutes on one core, which should have nothing else to do.
#
#     benchmarks/experiments/run.sh            all of them
#     benchmarks/experiments/run.sh prefix     some
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
vattn=${VATTN:-.venv/bin/vattn}
[ $# -gt 0 ] || set -- waste block-size page-size batching cow prefix kernels mapping no-gain preemption
for name in "$@"; do
    "$vattn" bench experiment "$name" --json "benchmarks/results/experiments/$name.json"
done
"$(dirname "$vattn")/python" benchmarks/experiments/document.py
