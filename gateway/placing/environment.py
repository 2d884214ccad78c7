# What a replica inherits of the controller's environment: what a program on this machine, CUDA, torch and the hub of
# models go by. A controller knows the keys of providers, stores and admins, and an engine needs none of them.

from __future__ import annotations

from collections.abc import Collection, Mapping

# A name that ends in * stands for all that begin so.
INHERITED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "HOSTNAME",
        "TMPDIR",
        "TMP",
        "TEMP",
        "TZ",
        "LANG",
        "LANGUAGE",
        "LC_*",
    ),
    *(
        "LD_*",
        "LIBRARY_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "CC",
        "CXX",
        "XDG_*",
        "PYTHON*",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "TORCH*", "PYTORCH_*", "TRITON_*", "CUBLAS_*", "CUDNN_*"),
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "MALLOC_*"),
    *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "SAFETENSORS_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    "TOLLGATE_MODELS",
    "TOLLGATE_MODELS_GIB",
)


def inherited(environment: Mapping[str, str], further: Collection[str]) -> dict[str, str]:
    """Return what of an environment goes to a replica; ``further``: names beside the usual ones."""
    told = (*INHERITED, *further)
    whole = {name for name in told if not name.endswith("*")}
    beginnings = tuple(name[:-1] for name in told if name.endswith("*"))
    return {name: value for name, value in environment.items() if name in whole or name.startswith(beginnings)}
