#!/usr/bin/env bash
# Every benchmark of measured data on the files of one folder (runs/*.jsonl*, kernels/gemm_measured.csv.gz, kernels/nccl_one_node.csv.gz); one JSON line each.
#   tests/bench/run.sh FOLDER [accuracy|regret|kernels ...]
set -euo pipefail
folder=$(cd "${1:?usage: run.sh FOLDER [accuracy|regret|kernels ...]}" && pwd)
shift
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
for benchmark in "${@:-accuracy regret kernels}"; do
    for name in $benchmark; do
        case $name in
        kernels) "$python" -m tests.bench.kernels --gemm "$folder"/kernels/gemm_measured.csv.gz --nccl "$folder"/kernels/nccl_one_node.csv.gz --json ;;
        *) "$python" -m "tests.bench.$name" --runs "$folder"/runs/*.jsonl* --json ;;
        esac
    done
done
