// A tool as NVTX loads it (NVTX_INJECTION64_PATH): prints the domain, name and payload of each range that opens,
// and "pop" where one closes. The layouts are those of nvtx3/nvtxDetail/nvtxTypes.h and nvToolsExt.h.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CALLBACKS = 1, CORE2 = 5, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12 };

typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
} attributes;

typedef void (*function)(void);

typedef struct {
  size_t size;
  int (*table)(int module, function*** functions, unsigned* count);
} callbacks;

static void* create(const char* name) { return strdup(name); }
static void* register_string(void* domain, const char* text) { return domain ? strdup(text) : NULL; }

static int push(const char* domain, const attributes* range) {
  printf("%s %s %lld\n", domain, range->message, range->payload_type ? (long long)range->payload : -1ll);
  fflush(stdout);
  return 0;
}

static int pop(const char* domain) {
  printf("%s pop\n", domain);
  fflush(stdout);
  return 0;
}

int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
  const callbacks* found = export_table(CALLBACKS);
  function** functions;
  unsigned count;
  if (!found || !found->table(CORE2, &functions, &count) || count <= CREATE) return 0;
  *functions[PUSH] = (function)push;
  *functions[POP] = (function)pop;
  *functions[REGISTER] = (function)register_string;
  *functions[CREATE] = (function)create;
  return 1;
}
