// The flight recorder: a ring of records for each communicator, and dumps of them as JSON lines.
// What dumps takes no lock that it could wait for, allocates nothing and needs no Python: it may run in a
// signal handler and in a thread that was never Python's.
#pragma once

#include "call.h"

typedef struct pynccl_trace pynccl_trace;

// `header` is the inside of a JSON object, which says what the communicator is. NULL where there is no
// memory.
pynccl_trace* pynccl_trace_open(size_t records, int size, const char* header);
// How many rings of closed communicators are kept for later dumps.
void pynccl_trace_keep(int count);

// A call that Python makes, with the communicator entered; answers what pynccl_trace_end takes.
uint64_t pynccl_trace_begin(pynccl_trace* trace, int kind, int detail);
void pynccl_trace_end(pynccl_trace* trace, uint64_t token, int result);
// The end of a communicator, from any thread.
void pynccl_trace_mark(pynccl_trace* trace, int kind);

// Where in the program the next calls come from: "file:line", and the number that stands for it.
unsigned pynccl_trace_intern(const char* text);
void pynccl_trace_caller(pynccl_trace* trace, unsigned caller);

// What every dump begins with: the inside of a JSON object; and where pynccl_trace_save writes, if anywhere.
int pynccl_trace_process(const char* header, const char* folder, const char* file);
// Dump all communicators, or one; 0, or an errno: EBUSY while another dump is under way.
int pynccl_trace_dump(int fd, const pynccl_trace* only);
// Remember why, for this and later dumps, and dump to the file of pynccl_trace_process.
int pynccl_trace_save(const char* kind, const char* text);
// Have a signal dump too, for the reason given, and then do what it did before; with a file (else -1), which
// that writes to, a line "end" follows there.
int pynccl_trace_on_signal(int number, const char* kind, const char* text, int fd);
void pynccl_trace_forked(void);
