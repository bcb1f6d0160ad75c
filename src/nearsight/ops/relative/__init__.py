"""Global attention with two-dimensional relative positions: AA-Net's branch, by rows on a CPU and by Triton's kernels."""
