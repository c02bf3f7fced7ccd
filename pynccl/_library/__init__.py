"""The shared libraries that pynccl calls: libnccl (functions, structs, results) and the CUDA driver.

`generated/` is generated from api/*.h and native/kinds.h. Imported by every room above it.
"""
