// One handle for each library, and every function of a table from that handle. The generated library.h has
// the tables and, for each function, a wrapper that takes integers for pointers and answers PYNCCL_NOT_FOUND
// or PYNCCL_NOT_LOADED where the table has none.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "status.h"

#pragma GCC visibility push(hidden)

struct pynccl_slot {
  const char* name;
  void** address;
};

struct pynccl_table {
  const struct pynccl_slot* slots;
  int count;
  int absent;  // what a call of an empty slot answers
};

#define PYNCCL_IF_LOADED 1  // only a library that is in the process already
#define PYNCCL_DEEPBIND 2   // its own functions first: another libnccl is in the process

void* pynccl_open(const char* path, int how);
void* pynccl_symbol(void* handle, const char* name);
int pynccl_close(void* handle);
// Why the newest pynccl_open of this thread failed, or NULL; valid until this thread's next dl call.
const char* pynccl_error(void);
const char* pynccl_path(void* handle);

// How many of the table's functions the library has.
int pynccl_count(const struct pynccl_table* table, void* handle);
void pynccl_fill(struct pynccl_table* table, void* handle);
void* pynccl_find(const struct pynccl_table* table, const char* name);

static inline int pynccl_absent(const struct pynccl_table* table) {
  return __atomic_load_n(&table->absent, __ATOMIC_ACQUIRE);
}

// How deep this thread is in ncclGroupStart calls made through pynccl.
extern __thread int pynccl_depth;

static inline int pynccl_group(int step, int result) {
  if (step > 0) pynccl_depth += result == 0;
  if (step < 0 && pynccl_depth > 0 && result < PYNCCL_NOT_FOUND)
    --pynccl_depth;  // NCCL leaves the group on errors too
  return result;
}

#pragma GCC visibility pop
