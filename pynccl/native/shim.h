// One handle for each library; every function of a table comes from that handle. The generated library.h has
// the tables and a wrapper for each function. A wrapper takes integers for pointers, and returns
// PYNCCL_NOT_FOUND or PYNCCL_NOT_LOADED if the table lacks the function.
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
  int absent;  // the result of a call through an empty slot
};

#define PYNCCL_IF_LOADED 1  // only if the process has loaded it already
#define PYNCCL_DEEPBIND 2   // it prefers its own symbols: the process has loaded another libnccl

void* pynccl_open(const char* path, int how);
void* pynccl_symbol(void* handle, const char* name);
int pynccl_close(void* handle);
// Why this thread's last pynccl_open failed, or NULL; valid until this thread's next dl call.
const char* pynccl_error(void);
const char* pynccl_path(void* handle);

// How many of the table's functions the library has.
int pynccl_count(const struct pynccl_table* table, void* handle);
void pynccl_fill(struct pynccl_table* table, void* handle);
void* pynccl_find(const struct pynccl_table* table, const char* name);

static inline int pynccl_absent(const struct pynccl_table* table) {
  return __atomic_load_n(&table->absent, __ATOMIC_ACQUIRE);
}

// How many ncclGroupStart calls through pynccl this thread has open.
extern __thread int pynccl_depth;

static inline int pynccl_group(int step, int result) {
  if (step > 0) pynccl_depth += result == 0;
  if (step < 0 && pynccl_depth > 0 && result < PYNCCL_NOT_FOUND)
    --pynccl_depth;  // NCCL leaves the group on errors too
  return result;
}

#pragma GCC visibility pop
