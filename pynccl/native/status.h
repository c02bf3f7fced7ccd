// Results of the binding's own functions. NCCL and CUDA use no numbers in this range.
#pragma once

enum pynccl_status {
  PYNCCL_NOT_FOUND = 1000,   // the loaded library lacks the function
  PYNCCL_NOT_LOADED = 1001,  // no library is loaded yet
  PYNCCL_RECORDED = 1002,    // not run: appended to the list that this thread records
  PYNCCL_WAITING = 1003,     // issued but not complete; the communicators stay entered until pynccl_leave
  PYNCCL_BUSY = 1004,        // another thread is using a communicator
  PYNCCL_CLOSED = 1005,      // a communicator was destroyed, aborted, or belongs to another process
  PYNCCL_OVERLAP = 1006,     // the buffers overlap in a way that NCCL forbids
  PYNCCL_NO_MEMORY = 1007,
  PYNCCL_STOPPED = 1008,      // a signal interrupted the comparison of calls between the ranks
  PYNCCL_INTERRUPTED = 1009,  // tells a prepared call that the wait for its end has raised
  PYNCCL_NO_WINDOW = 1010,    // the window of a put is closed
  PYNCCL_CAPTURED = 1011,     // check mode cannot compare a call that a graph captures
  PYNCCL_TOO_LATE = 1012      // the comparison took longer than its caller would wait
};
