// Results of the binding's functions beside NCCL's and CUDA's, which have no numbers in this range.
#pragma once

enum pynccl_status {
  PYNCCL_NOT_FOUND = 1000,   // the loaded library lacks the function
  PYNCCL_NOT_LOADED = 1001,  // no library is loaded yet
  PYNCCL_RECORDED = 1002,    // not run: it is in the list that this thread records
  PYNCCL_WAITING = 1003,     // issued, not complete; the communicators stay entered until pynccl_leave
  PYNCCL_BUSY = 1004,        // another thread is using a communicator
  PYNCCL_CLOSED = 1005,      // a communicator was destroyed, aborted, or belongs to another process
  PYNCCL_OVERLAP = 1006,     // the buffers overlap in a way that NCCL forbids
  PYNCCL_NO_MEMORY = 1007,
  PYNCCL_STOPPED = 1008,     // by a signal, while the ranks compared the call
  PYNCCL_INTERRUPTED = 1009  // what a prepared call is told when waiting for its end has raised
};
