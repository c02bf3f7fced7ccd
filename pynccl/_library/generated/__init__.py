"""What tools/generate_api.py derives from native/nccl_api.h: constants, and a function per C function."""
