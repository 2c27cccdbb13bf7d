"""Caches of compilers on a node: each is set by a variable of the environment, or lies in the home directory.

A home directory on a shared filesystem is unsuitable: all ranks of all nodes compile the same kernels at a start,
tear each other's files there, and load code from where other machines write. So a plan puts each of these on the node's
own disk (`hpcrl.jobplan.environment`), and the guard of a role makes the directory private
(`hpcrl.supervisor.process.node_values`). Standard library only.
"""

COMPILE_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    # builds of torch.utils.cpp_extension
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    # kernels that torch brings along in CuTe
    "QUACK_CACHE_DIR": "quack",
    "VLLM_CACHE_ROOT": "vllm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "EP_JIT_CACHE_DIR": "deep_ep",
    # FlashInfer makes .cache/flashinfer in it
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    # sgl-deep-gemm, and other builds with TVM's interface
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    # CUTLASS in Python: kernels of cuDNN's frontend and of FlashInfer
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "TILELANG_CACHE_DIR": "tilelang",
    "NUMBA_CACHE_DIR": "numba",
    # the driver's own, for PTX
    "CUDA_CACHE_PATH": "cuda",
}
"""The directory of each variable below that of the run on the node's disk."""
