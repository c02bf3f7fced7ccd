#include "names.h"

#include "kinds.h"

#define PYNCCL_ROW(kind, number, name, function, arguments) [number] = {name, function, arguments},

static const struct {
  const char* name;
  const char* function;
  int arguments;
} pynccl_kinds[] = {PYNCCL_KINDS(PYNCCL_ROW)};

static int pynccl_known(int kind) {
  return kind >= 0 && kind < (int)(sizeof pynccl_kinds / sizeof *pynccl_kinds) && pynccl_kinds[kind].name;
}

const char* pynccl_kind_name(int kind) {
  return pynccl_known(kind) ? pynccl_kinds[kind].name : "something unknown";
}

const char* pynccl_kind_function(int kind) { return pynccl_known(kind) ? pynccl_kinds[kind].function : ""; }

static int pynccl_takes(int kind, int argument) {
  return pynccl_known(kind) && pynccl_kinds[kind].arguments & argument;
}

int pynccl_reduces(int kind) { return pynccl_takes(kind, PYNCCL_REDUCES); }

int pynccl_has_root(int kind) { return pynccl_takes(kind, PYNCCL_HAS_ROOT); }
