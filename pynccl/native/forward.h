// The forwarding library loads the CPU library, which lies beside this file's folder, at the first call. So
// it costs shells and launchers nothing if it is preloaded into them.
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTIONS (sizeof(names) / sizeof(names[0]))

static void* functions[FUNCTIONS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void* open_cpu_library(void) {
  Dl_info self;
  char path[PATH_MAX + 32];
  if (!dladdr((void*)functions, &self) || !realpath(self.dli_fname, path)) return NULL;
  *strrchr(path, '/') = '\0';
  strcat(path, "/../libpynccl_cpu.so");
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void load(void) {
  void* library = open_cpu_library();
  if (!library) {
    const char* why = dlerror();
    fprintf(stderr, "pynccl: the CPU library cannot be loaded: %s\n", why ? why : "its place is unknown");
    return;
  }
  for (size_t i = 0; i < FUNCTIONS; ++i) functions[i] = dlsym(library, names[i]);
}

static void* function(size_t index) {
  pthread_once(&once, load);
  return functions[index];
}
