// One library's functions, by address, and their errors as torch's exceptions.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

extern "C" {
#define _Bool bool
// clang-format off: the second needs the first
#include "nccl_api.h"
#include "cpu_api.h"
// clang-format on
#undef _Bool
}

#include "since.hpp"

namespace pynccl {

// clang-format off: its result is not stable for these macros
#define PYNCCL_TORCH_NEEDED(X)                                                                        \
  X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommDestroy) X(ncclCommAbort) X(ncclCommGetAsyncError) \
  X(ncclCommCount) \
  X(ncclGetErrorString) X(ncclGroupStart) X(ncclGroupEnd) X(ncclReduce) X(ncclBroadcast)              \
  X(ncclAllReduce) X(ncclReduceScatter) X(ncclAllGather) X(ncclSend) X(ncclRecv)
// NULL if an older libnccl lacks the function.
#define PYNCCL_TORCH_OPTIONAL(X)                                                               \
  X(ncclGetLastError) X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclCommShrink)        \
  X(ncclCommSplit)                                                                             \
  X(ncclCommSuspend) X(ncclCommResume) X(ncclCommMemStats)                                     \
  X(ncclCommWindowRegister) X(ncclCommWindowDeregister)                                        \
  X(ncclPutSignal) X(ncclSignal) X(ncclWaitSignal)                                             \
  X(pyncclCpuStreamCreateWithFlags) X(pyncclCpuStreamDestroy) X(pyncclCpuStreamQuery)          \
  X(pyncclCpuStreamSynchronize) X(pyncclCpuInterrupt) X(pyncclCpuIsGone) X(pyncclCpuIsAwaited)
// clang-format on

// With NCCL_COMM_BLOCKING=0 a call may still be under way when it returns.
inline bool failed(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

// Makes the text of an error from the name of the operation and the library's text.
using Wording = std::function<std::string(const std::string& what, const std::string& text)>;

struct Api {
#define PYNCCL_MEMBER(name) decltype(&::name) name = nullptr;
  PYNCCL_TORCH_NEEDED(PYNCCL_MEMBER)
  PYNCCL_TORCH_OPTIONAL(PYNCCL_MEMBER)
#undef PYNCCL_MEMBER

  explicit Api(const std::map<std::string, uintptr_t>& addresses) {
    auto find = [&](const char* name) {
      auto at = addresses.find(name);
      return at == addresses.end() ? uintptr_t{0} : at->second;
    };
#define PYNCCL_TAKE(name) name = reinterpret_cast<decltype(name)>(find(#name));
#define PYNCCL_REQUIRE(name) \
  PYNCCL_TAKE(name)          \
  TORCH_CHECK(name, "the loaded NCCL library has no function " #name);
    PYNCCL_TORCH_NEEDED(PYNCCL_REQUIRE)
    PYNCCL_TORCH_OPTIONAL(PYNCCL_TAKE)
#undef PYNCCL_REQUIRE
#undef PYNCCL_TAKE
  }

  std::string describe(ncclResult_t result, ncclComm_t comm) const {
    std::string text = ncclGetErrorString(result);
    const char* last = ncclGetLastError ? ncclGetLastError(comm) : nullptr;
    if (!last || !*last) return text;
    // NCCL's last error may be that of an earlier call.
    return pyncclCpuIsGone ? last : text + ": " + last;
  }

  void check(ncclResult_t result, const std::string& what, ncclComm_t comm = nullptr,
             const Wording& wording = nullptr) const {
    if (!failed(result)) return;
    const std::string text = describe(result, comm);
    C10_THROW_ERROR(DistBackendError, wording ? wording(what, text) : what + ": " + text);
  }
};

using ApiPtr = std::shared_ptr<const Api>;

// A function that older libraries lack: PYNCCL_KNOWN(api, ncclCommSuspend)(comm, flags).
#define PYNCCL_KNOWN(api, name) ::pynccl::known((api).name, #name, PYNCCL_SINCE_##name)
template <class Function>
Function known(Function function, const char* name, const char* since) {
  TORCH_CHECK_NOT_IMPLEMENTED(function, "pynccl: the loaded NCCL has no ", name, ": it needs ", since,
                              " or newer");
  return function;
}

// Several calls as one; the first failure is the result.
template <class Body>
ncclResult_t grouped(const Api& api, Body body) {
  ncclResult_t first = api.ncclGroupStart();
  if (failed(first)) return first;
  try {
    first = body();
  } catch (...) {
    // Else every later call of this thread would only be recorded.
    api.ncclGroupEnd();
    throw;
  }
  ncclResult_t last = api.ncclGroupEnd();
  return failed(first) ? first : last;
}

}  // namespace pynccl
