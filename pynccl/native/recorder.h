// The flight recorder: a ring of records for each communicator, and dumps of them as JSON lines.
// A dump waits for no lock, allocates nothing and needs no Python. So it can run in a signal handler and in a
// thread that Python does not know.
#pragma once

#include "call.h"

typedef struct pynccl_trace pynccl_trace;

// `header` is the inside of a JSON object that describes the communicator. NULL without memory.
pynccl_trace* pynccl_trace_open(size_t records, int size, const char* header);
// Learn the algorithms of a communicator of the CPU library, so that dumps show them.
void pynccl_trace_algorithms(pynccl_trace* trace, uintptr_t comm);
// Set how many rings of closed communicators are kept for later dumps.
void pynccl_trace_keep(int count);

// Record a call that Python makes with the communicator entered. The result is the token for
// pynccl_trace_end.
uint64_t pynccl_trace_begin(pynccl_trace* trace, int kind, int detail);
void pynccl_trace_end(pynccl_trace* trace, uint64_t token, int result);
// Record the end of a communicator, from any thread.
void pynccl_trace_mark(pynccl_trace* trace, int kind);

// The place in the program of the next calls: a number for "file:line".
unsigned pynccl_trace_intern(const char* text);
void pynccl_trace_caller(pynccl_trace* trace, unsigned caller);

// Set the first line of every dump, the inside of a JSON object, and the file of pynccl_trace_save, if any.
int pynccl_trace_process(const char* header, const char* folder, const char* file);
// Dump all communicators, or one. Returns 0 or an errno: EBUSY during another dump.
int pynccl_trace_dump(int fd, const pynccl_trace* only);
// Add a reason to this and later dumps, and dump to the file of pynccl_trace_process.
int pynccl_trace_save(const char* kind, const char* text);
// Make a signal dump for this reason and then call the handler that was installed before. `fd` is the file
// that the earlier handler writes to, or -1; a line "end" follows in it.
int pynccl_trace_on_signal(int number, const char* kind, const char* text, int fd);
void pynccl_trace_forked(void);
// The nanoseconds of a number of ticks.
int64_t pynccl_trace_span(uint64_t ticks);
