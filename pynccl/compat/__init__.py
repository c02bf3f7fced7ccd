"""Other bindings' interfaces over pynccl: change the import, keep the program.

cupy     cupy.cuda.nccl
cupyx    cupyx.distributed
"""
