"""What tools/generate_api.py derives from api/nccl_api.h: constants, and a function per C function."""
