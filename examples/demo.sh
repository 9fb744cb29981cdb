#!/usr/bin/env bash
# Plan Llama-3-70B for 64 H100 and export it to three launchers; then plan a small GPT for 4 CPU ranks of this machine and train it under that plan.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=${1:-out/demo}
mkdir -p "$out"

say() { printf '\n== %s\n' "$*"; }
plan70b() { autoplan plan llama3-70b '8xH100*8' --seq-len 8192 --global-batch 512 --time-limit 120 --engine "$1" -o "$out/llama3-70b-$1.json"; }

say "Llama-3-70B on 8 hosts of 8 H100, sequences of 8192 tokens, 512 a step: the plan for Megatron-LM"
plan70b megatron
say "The same for torchtitan and for this project's own runtime (plans kept in $out)"
plan70b torchtitan > "$out/llama3-70b-torchtitan.txt"
plan70b torch > "$out/llama3-70b-torch.txt"

say "As files of each launcher; what a launcher cannot carry is said (without --allow-loss that is exit code 3)"
autoplan export "$out/llama3-70b-megatron.json" --to megatron -o "$out/megatron"
autoplan export "$out/llama3-70b-torchtitan.json" --to torchtitan -o "$out/torchtitan" --allow-loss
autoplan export "$out/llama3-70b-torch.json" --to torchrun -o "$out/torchrun"

say "A small GPT on 4 CPU ranks of this machine: 20 steps under its plan, predicted against measured"
autoplan plan examples.gpt:build_model local-cpu:4 --seq-len 64 --global-batch 16 --precision fp32 -o "$out/gpt.json"
autoplan run "$out/gpt.json" examples.gpt:build_model --steps 20
