#include "reduce/reduce.hpp"

#include <cstring>

#include "base/generated.inc"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GCC only: clang has no pragma that sets the target of a region.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PNCPU_X86_TARGETS 1
#endif

namespace pncpu {
namespace {

struct Call {
  void* out;
  const void* const* in;
  int k;
  size_t n;
  ncclDataType_t type;
  RedKind kind;
  int nranks;
  const PreMul* scalars;
};

// A product and a sum are two roundings everywhere, whatever the flags of the build say.
#if defined(__clang__)
#define PNCPU_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#pragma STDC FP_CONTRACT OFF
#else
#define PNCPU_IVDEP _Pragma("GCC ivdep")
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math")
#endif

#define PNCPU_F16C 0
namespace baseline {
#include "reduce/reduce_kernels.inc"
}  // namespace baseline
#undef PNCPU_F16C

#if PNCPU_X86_TARGETS
#define PNCPU_F16C 1
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "reduce/reduce_kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#include "reduce/reduce_kernels.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

#if !defined(__clang__)
#pragma GCC pop_options
#endif

// Sets the default floating-point mode and restores the caller's, which may flush subnormals, round
// differently or trap.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(get()) {
    if (saved_ != kDefault) set(kDefault);
  }
  ~DefaultFloatMode() {
    if (saved_ != kDefault) set(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;
  static uint64_t get() { return _mm_getcsr() & ~uint64_t{0x3f}; }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t get() { return kDefault; }
  static void set(uint64_t) {}
#endif
  uint64_t saved_;
};

Isa best_isa() {
  if (isa_supported(Isa::Avx512)) return Isa::Avx512;
  return isa_supported(Isa::Avx2) ? Isa::Avx2 : Isa::Baseline;
}

struct TypeInfo {
  const char* name;
  size_t size;
};

#define PNCPU_NAME_AND_SIZE(name, size) {name, size},
constexpr TypeInfo kTypes[ncclNumTypes] = {PNCPU_TYPES(PNCPU_NAME_AND_SIZE)};
#undef PNCPU_NAME_AND_SIZE

bool is_type(ncclDataType_t type) { return type >= 0 && type < ncclNumTypes; }

}  // namespace

bool isa_supported(Isa isa) {
  if (isa == Isa::Baseline) return true;
#if PNCPU_X86_TARGETS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == Isa::Avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

void reduce_on(Isa isa, void* out, const void* const* in, int k, size_t n, ncclDataType_t type, RedKind kind,
               int nranks, const PreMul* scalars) {
  if (n == 0) return;
  if (k == 1 && kind != RedKind::Avg && kind != RedKind::PreMulSum) {
    if (out != in[0]) std::memcpy(out, in[0], n * type_size(type));
    return;
  }
  const DefaultFloatMode mode;
  const Call call{out, in, k, n, type, kind, nranks, scalars};
#if PNCPU_X86_TARGETS
  if (isa == Isa::Avx512) return avx512::run(call);
  if (isa == Isa::Avx2) return avx2::run(call);
#endif
  (void)isa;
  baseline::run(call);
}

void reduce(void* out, const void* const* in, int k, size_t n, ncclDataType_t type, RedKind kind, int nranks,
            const PreMul* scalars) {
  static const Isa isa = best_isa();
  reduce_on(isa, out, in, k, n, type, kind, nranks, scalars);
}

size_t type_size(ncclDataType_t type) { return is_type(type) ? kTypes[type].size : 0; }

const char* type_name(ncclDataType_t type) { return is_type(type) ? kTypes[type].name : "unknown type"; }

const char* op_name(RedKind kind) {
#define PNCPU_NAME(name) name,
  constexpr const char* names[] = {PNCPU_OPS(PNCPU_NAME) "pre_mul_sum"};
#undef PNCPU_NAME
  return names[static_cast<int>(kind)];
}

}  // namespace pncpu
