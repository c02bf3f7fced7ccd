"""Other bindings' interfaces over pynccl: change the import, keep the program.

cupy     cupy.cuda.nccl
cupyx    cupyx.distributed
vllm     vLLM's pynccl_wrapper.py and pynccl.py
sglang   SGLang's copies of these

Imported by no other room.
"""
