"""Architecture facts of language models, without torch: usable on a login node."""

from hpcrl.models.arch import ModelArch, load_arch
from hpcrl.models.facts import ModelFacts
from hpcrl.models.flops import Flops
from hpcrl.models.known import known_models, load_facts
from hpcrl.models.tensors import DTYPE_BYTES, Part, TensorSpec

__all__ = [
    "DTYPE_BYTES",
    "Flops",
    "ModelArch",
    "ModelFacts",
    "Part",
    "TensorSpec",
    "known_models",
    "load_arch",
    "load_facts",
]
