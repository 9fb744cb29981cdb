"""Price layouts of your own side by side: tensor or pipeline parallelism inside one host, with few and with many micro-batches.

python -m examples.compare_layouts
"""

from __future__ import annotations

from planner import Job, Mesh, Strategy, estimate

LAYOUTS = {
    "tp 8": Strategy(mesh=Mesh(tp=8), sequence_parallel=True, recompute="selective"),
    "pp 8": Strategy(mesh=Mesh(pp=8), schedule="1f1b", recompute="selective"),
}


def main() -> None:
    """One line a layout and global batch: seconds of a step by cause, and the peak."""
    for global_batch in (8, 32, 128):
        for name, strategy in LAYOUTS.items():
            priced = estimate("llama2-13b", "8xA100-80GB", Job(global_batch=global_batch, seq_len=4096), strategy, engine="megatron")
            causes = ", ".join(f"{line.name.replace('_', ' ')} {line.amount:.2f}" for line in priced.time if line.amount >= 0.01)
            fits = "fits" if priced.fits else "does not fit"
            print(f"batch {global_batch:3}  {name}: {priced.step_s:6.2f} s ({causes}), {priced.peak_bytes / 2**30:.1f} GiB, {fits}")


if __name__ == "__main__":
    main()
