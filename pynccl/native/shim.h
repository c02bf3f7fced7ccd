// What the generated tables stand on: one handle per library, and every function of a table from that handle.
#ifndef PYNCCL_SHIM_H
#define PYNCCL_SHIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PYNCCL_NOT_FOUND 1000   // the loaded library lacks the function
#define PYNCCL_NOT_LOADED 1001  // no library is loaded yet

struct pynccl_slot {
  const char* name;
  void** address;
};

struct pynccl_table {
  const struct pynccl_slot* slots;
  int count;
  int absent;  // what a call of an empty slot answers
};

static __thread const char* pynccl_failure;

#define PYNCCL_IF_LOADED 1  // only a library that is in the process already
#define PYNCCL_DEEPBIND 2   // its own functions first: another libnccl is in the process

static void* pynccl_open(const char* path, int how) {
  // RTLD_LOCAL: nobody else's lookups may end in this copy.
  int flags = RTLD_NOW | RTLD_LOCAL;
  if (how & PYNCCL_IF_LOADED) flags |= RTLD_NOLOAD;
  if (how & PYNCCL_DEEPBIND) flags |= RTLD_DEEPBIND;
  void* handle = dlopen(path, flags);
  pynccl_failure = handle ? NULL : dlerror();
  return handle;
}

static void* pynccl_symbol(void* handle, const char* name) { return dlsym(handle, name); }

static int pynccl_close(void* handle) { return dlclose(handle); }

// Why the newest pynccl_open of this thread failed, or NULL; valid until this thread's next dl call.
static const char* pynccl_error(void) { return pynccl_failure; }

static const char* pynccl_path(void* handle) {
  struct link_map* map = NULL;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : NULL;
}

// How many of the table's functions the library has.
static int pynccl_count(const struct pynccl_table* table, void* handle) {
  int found = 0;
  for (int i = 0; i < table->count; ++i) found += dlsym(handle, table->slots[i].name) != NULL;
  return found;
}

static void pynccl_fill(struct pynccl_table* table, void* handle) {
  for (int i = 0; i < table->count; ++i)
    __atomic_store_n(table->slots[i].address, dlsym(handle, table->slots[i].name), __ATOMIC_RELEASE);
  __atomic_store_n(&table->absent, PYNCCL_NOT_FOUND, __ATOMIC_RELEASE);
}

static void* pynccl_find(const struct pynccl_table* table, const char* name) {
  for (int i = 0; i < table->count; ++i)
    if (strcmp(table->slots[i].name, name) == 0)
      return __atomic_load_n(table->slots[i].address, __ATOMIC_ACQUIRE);
  return NULL;
}

#define PYNCCL_TABLE_FUNCTIONS(table)                                             \
  static int table##_count(void* handle) { return pynccl_count(&table, handle); } \
  static void table##_bind(void* handle) { pynccl_fill(&table, handle); }         \
  static void* table##_find(const char* name) { return pynccl_find(&table, name); }

// How deep this thread is in ncclGroupStart calls made through pynccl.
static __thread int pynccl_depth;

static int pynccl_group(int step, int result) {
  if (step > 0) pynccl_depth += result == 0;
  if (step < 0 && pynccl_depth > 0 && result < PYNCCL_NOT_FOUND)
    --pynccl_depth;  // NCCL leaves the group on errors too
  return result;
}

#endif
