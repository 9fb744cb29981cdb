#!/usr/bin/env bash
# Every benchmark of this folder, one after the other; each prints one JSON line per figure.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for benchmark in ${@:-accuracy}; do
    python -m "tests.bench.$benchmark"
done
