#include "shim.h"

#include <dlfcn.h>
#include <link.h>

static __thread const char* pynccl_failure;

__thread int pynccl_depth;

void* pynccl_open(const char* path, int how) {
  // RTLD_LOCAL: other libraries must not find their symbols in this copy.
  int flags = RTLD_NOW | RTLD_LOCAL;
  if (how & PYNCCL_IF_LOADED) flags |= RTLD_NOLOAD;
  if (how & PYNCCL_DEEPBIND) flags |= RTLD_DEEPBIND;
  void* handle = dlopen(path, flags);
  pynccl_failure = handle ? NULL : dlerror();
  return handle;
}

void* pynccl_symbol(void* handle, const char* name) { return dlsym(handle, name); }

int pynccl_close(void* handle) { return dlclose(handle); }

const char* pynccl_error(void) { return pynccl_failure; }

const char* pynccl_path(void* handle) {
  struct link_map* map = NULL;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : NULL;
}

int pynccl_count(const struct pynccl_table* table, void* handle) {
  int found = 0;
  for (int i = 0; i < table->count; ++i) found += dlsym(handle, table->slots[i].name) != NULL;
  return found;
}

void pynccl_fill(struct pynccl_table* table, void* handle) {
  for (int i = 0; i < table->count; ++i)
    __atomic_store_n(table->slots[i].address, dlsym(handle, table->slots[i].name), __ATOMIC_RELEASE);
  __atomic_store_n(&table->absent, PYNCCL_NOT_FOUND, __ATOMIC_RELEASE);
}

void* pynccl_find(const struct pynccl_table* table, const char* name) {
  for (int i = 0; i < table->count; ++i)
    if (strcmp(table->slots[i].name, name) == 0)
      return __atomic_load_n(table->slots[i].address, __ATOMIC_ACQUIRE);
  return NULL;
}
