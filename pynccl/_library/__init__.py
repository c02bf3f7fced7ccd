"""The shared libraries that pynccl calls: libnccl (functions, structs, results) and the CUDA driver.

`generated/` is generated from api/nccl_api.h. Imports only the base modules (`_errors`, `_package`,
`_timeouts`, `_version`); every other package may import this one.
"""
