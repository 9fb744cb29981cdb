#!/usr/bin/env bash
# Plan Llama-3-70B for 64 H100 and export it to three launchers; then plan a small GPT for 4 CPU ranks of this machine and train it under that plan.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=${1:-out/demo}
mkdir -p "$out"

echo "== Llama-3-70B on 8 hosts of 8 H100: sequences of 8192 tokens, 512 a step"
for engine in torchtitan megatron torch; do
    autoplan plan llama3-70b '8xH100*8' --seq-len 8192 --global-batch 512 --engine "$engine" --time-limit 30 -o "$out/llama3-70b-$engine.json"
done

echo "== The same, as files of each launcher"
autoplan export "$out/llama3-70b-torchtitan.json" --to torchtitan -o "$out/torchtitan"
autoplan export "$out/llama3-70b-megatron.json" --to megatron -o "$out/megatron"
autoplan export "$out/llama3-70b-torch.json" --to torchrun -o "$out/torchrun"

echo "== A small GPT on 4 CPU ranks of this machine: 20 steps under its plan, predicted against measured"
autoplan plan examples.gpt:build_model local-cpu:4 --seq-len 64 --global-batch 16 --precision fp32 -o "$out/gpt.json"
autoplan run "$out/gpt.json" examples.gpt:build_model --steps 20
