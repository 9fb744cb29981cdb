"""Plan a model from its Hugging Face config.json, for several clusters, without torch and without its weights.

python -m examples.plan_hf_config path/to/config.json
"""

from __future__ import annotations

import sys

from planner import InfeasibleError, Job, autoplan

QWEN_LIKE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
CLUSTERS = ("8xA100-40GB", "8xA100-80GB*2", "8xH100*2", "8xH200")


def main(model: str | dict[str, object] = QWEN_LIKE) -> None:
    """One line a cluster: tokens per second and the mesh, or why it does not fit."""
    for cluster in CLUSTERS:
        try:
            plan = autoplan(model, cluster, Job(global_batch=128, seq_len=4096))
        except InfeasibleError as error:
            print(f"{cluster:14} {error}")
        else:
            mesh = plan.strategy.mesh
            print(f"{cluster:14} {plan.estimate.tokens_per_s:8,.0f} tokens/s  pp {mesh.pp} dp {mesh.dp} cp {mesh.cp} tp {mesh.tp}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
