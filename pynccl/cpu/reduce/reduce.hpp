// Reductions over host memory, for every collective that computes.
//
// out[i] = finish(in[0][i] op in[1][i] op ... op in[k-1][i]), strictly in that order, independently for
// each element. The bits of a result do not depend on alignment, n, blocking, the CPU's instruction set or
// the thread's floating-point mode.
//
// out may be any of the in[j] (same address); no other overlap. Pointers need no alignment. k >= 1. One input
// is copied; Avg and PreMulSum still apply.
//
// - Integers wrap around. Avg divides the wrapped sum by nranks and truncates toward zero.
// - Floats: Avg multiplies each input by 1/nranks before summing, PreMulSum input j by scalars[j]; neither is
//   fused with the addition. float16, bfloat16 and float8 do all of it in float32 and round once, to nearest
//   even. Subnormals are exact.
// - Max and Min ignore a NaN as long as another input is a number, and take +0 as greater than -0, as CUDA's
//   fmax and fmin do.
// - A NaN result is always the same one: positive, quiet, no payload (float16 0x7e00, bfloat16 0x7fc0, e4m3fn
//   0x7f, e5m2 0x7e). A plain copy of one input keeps its bits.
// - float8 saturates: what lies beyond +-448 (e4m3fn) or +-57344 (e5m2) becomes that bound. So do infinite
//   inputs and sums: no reduction gives an e5m2 infinity (CUDA's __NV_SATFINITE).
#pragma once

#include "base/nccl.hpp"

namespace pncpu {

struct PreMul {
  alignas(8) unsigned char bytes[8];  // a scalar of the operation's datatype
};

enum class RedKind { Sum, Prod, Max, Min, Avg, PreMulSum };

// nranks matters to Avg, scalars (k of them) to PreMulSum.
void reduce(void* out, const void* const* in, int k, size_t n, ncclDataType_t type, RedKind kind, int nranks,
            const PreMul* scalars);

size_t type_size(ncclDataType_t type);  // 0 if it is not a datatype
inline bool is_integer(ncclDataType_t type) { return type <= ncclUint64; }
const char* type_name(ncclDataType_t type);  // "float32"
const char* op_name(RedKind kind);           // "sum"

// The instruction sets the kernels are built for, in ascending order of speed. reduce() takes the last one
// that this CPU has; the tests compare them all.
enum class Isa { Baseline, Avx2, Avx512 };
bool isa_supported(Isa isa);
void reduce_on(Isa isa, void* out, const void* const* in, int k, size_t n, ncclDataType_t type, RedKind kind,
               int nranks, const PreMul* scalars);

}  // namespace pncpu
