"""Architecture facts of language models, without torch: usable on a login node."""

from hpcrl.models.arch import ModelArch, TensorSpec, load_arch

__all__ = ["ModelArch", "TensorSpec", "load_arch"]
