"""The shared libraries behind pynccl: libnccl's functions, structs and results, and the CUDA driver's.

`generated/` follows from native/nccl_api.h. Imports only the base modules (`_errors`, `_package`,
`_timeouts`, `_version`); everything else may import this.
"""
