"""hpcrl: asynchronous reinforcement learning of large MoE language models on Slurm clusters.

Importing this package (and ``hpcrl.cli``) never imports torch: the control plane runs on login nodes.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
