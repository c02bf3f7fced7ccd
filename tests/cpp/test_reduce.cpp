// Every datatype, operation and instruction set against a plain definition of each, element by element, bit
// by bit.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "helpers.hpp"
#include "reduce/reduce.hpp"

using namespace testing;
using namespace pncpu;

namespace {

using Bytes = std::vector<unsigned char>;
using Bits = uint64_t;  // an element's bits

constexpr Isa kIsas[] = {Isa::Baseline, Isa::Avx2, Isa::Avx512};
constexpr RedKind kKinds[] = {RedKind::Sum, RedKind::Prod, RedKind::Max,
                              RedKind::Min, RedKind::Avg,  RedKind::PreMulSum};

void fail(const char* what, Isa isa, ncclDataType_t type, RedKind kind, int k, size_t n) {
  FAIL_CHECK(formatted("%s: isa %d, %s, %s, k %d, n %zu", what, static_cast<int>(isa), type_name(type),
                       op_name(kind), k, n));
  if (failures >= 20) FAIL("too many failures");
}

// ---- What each type and operation means ----

struct Format {  // of a float that is computed in float32
  int bits, mantissa, bias;
  double greatest;
  Bits nan, overflow;  // overflow: what larger magnitudes become
  bool infinities;
};

Format format_of(ncclDataType_t type) {
  if (type == ncclFloat16) return {16, 10, 15, 65504, 0x7e00, 0x7c00, true};
  if (type == ncclBfloat16) return {16, 7, 127, std::ldexp(255, 120), 0x7fc0, 0x7f80, true};
  if (type == ncclFloat8e4m3) return {8, 3, 7, 448, 0x7f, 0x7e, false};
  return {8, 2, 15, 57344, 0x7e, 0x7b, true};
}

float decode(const Format& f, Bits raw) {
  const Bits magnitude = raw & ((Bits{1} << (f.bits - 1)) - 1);
  const double sign = raw >> (f.bits - 1) ? -1 : 1;
  const int exponent = static_cast<int>(magnitude >> f.mantissa);
  const double fraction = static_cast<double>(magnitude & ((Bits{1} << f.mantissa) - 1));
  const bool special = f.infinities ? exponent == (1 << (f.bits - 1 - f.mantissa)) - 1 : magnitude == 0x7f;
  if (special) return static_cast<float>(f.infinities && fraction == 0 ? sign * INFINITY : NAN);
  const double significand = exponent == 0 ? fraction : fraction + std::ldexp(1, f.mantissa);
  return static_cast<float>(sign * std::ldexp(significand, (exponent ? exponent : 1) - f.bias - f.mantissa));
}

Bits encode(const Format& f, float x) {
  if (std::isnan(x)) return f.nan;
  const Bits sign = std::signbit(x) ? Bits{1} << (f.bits - 1) : 0;
  const double a = std::fabs(static_cast<double>(x));
  if (a == 0) return sign;
  const int exponent = std::isinf(a) ? 0 : std::max(std::ilogb(a), 1 - f.bias);
  const double steps = std::nearbyint(std::ldexp(a, f.mantissa - exponent));
  if (std::isinf(a) || std::ldexp(steps, exponent - f.mantissa) > f.greatest) return sign | f.overflow;
  // A carry out of the significand, and the first normal number, come out right by themselves.
  return sign | (static_cast<Bits>(steps) + (static_cast<Bits>(exponent + f.bias - 1) << f.mantissa));
}

template <class T>
T get(Bits raw) {
  T value;
  std::memcpy(&value, &raw, sizeof value);
  return value;
}

template <class T>
Bits put(T value) {
  Bits raw = 0;
  if (value != value) value = static_cast<T>(__builtin_nan(""));
  std::memcpy(&raw, &value, sizeof value);
  return raw;
}

template <class T>
T extremum(T a, T b, bool max) {
  if (a != a || b != b) return a != a ? b : a;
  if (a == b) return std::signbit(a) == max ? b : a;
  return (a > b) == max ? a : b;
}

template <class T>
T float_result(const std::vector<T>& x, RedKind kind, int nranks, const std::vector<T>& scalars) {
  T acc = 0;
  for (size_t j = 0; j < x.size(); j++) {
    volatile T term = x[j];  // volatile: no fused multiply-add
    if (kind == RedKind::Avg) term = term * (T(1) / static_cast<T>(nranks));
    if (kind == RedKind::PreMulSum) term = term * scalars[j];
    if (j == 0) {
      acc = term;
    } else if (kind == RedKind::Prod) {
      acc *= term;
    } else if (kind == RedKind::Max || kind == RedKind::Min) {
      acc = extremum<T>(acc, term, kind == RedKind::Max);
    } else {
      acc += term;
    }
  }
  return acc;
}

template <class T>
Bits int_result(const std::vector<Bits>& x, RedKind kind, int nranks, const std::vector<Bits>& scalars) {
  Bits acc = x[0] * (kind == RedKind::PreMulSum ? scalars[0] : 1);
  for (size_t j = 1; j < x.size(); j++) {
    if (kind == RedKind::Prod) {
      acc *= x[j];
    } else if (kind == RedKind::Max) {
      acc = get<T>(x[j]) > get<T>(acc) ? x[j] : acc;
    } else if (kind == RedKind::Min) {
      acc = get<T>(x[j]) < get<T>(acc) ? x[j] : acc;
    } else {
      acc += x[j] * (kind == RedKind::PreMulSum ? scalars[j] : 1);
    }
  }
  const T value = get<T>(acc);
  return put<T>(kind == RedKind::Avg ? static_cast<T>(value / static_cast<T>(nranks)) : value);
}

template <class T>
Bits native_result(const std::vector<Bits>& x, RedKind kind, int nranks, const std::vector<Bits>& scalars) {
  std::vector<T> values, factors;
  for (Bits raw : x) values.push_back(get<T>(raw));
  for (Bits raw : scalars) factors.push_back(get<T>(raw));
  return put<T>(float_result<T>(values, kind, nranks, factors));
}

Bits result(ncclDataType_t type, const std::vector<Bits>& x, RedKind kind, int nranks,
            const std::vector<Bits>& scalars) {
  if (x.size() == 1 && kind != RedKind::Avg && kind != RedKind::PreMulSum) return x[0];
  switch (type) {
    case ncclInt8:
      return int_result<int8_t>(x, kind, nranks, scalars);
    case ncclUint8:
      return int_result<uint8_t>(x, kind, nranks, scalars);
    case ncclInt32:
      return int_result<int32_t>(x, kind, nranks, scalars);
    case ncclUint32:
      return int_result<uint32_t>(x, kind, nranks, scalars);
    case ncclInt64:
      return int_result<int64_t>(x, kind, nranks, scalars);
    case ncclUint64:
      return int_result<uint64_t>(x, kind, nranks, scalars);
    case ncclFloat32:
      return native_result<float>(x, kind, nranks, scalars);
    case ncclFloat64:
      return native_result<double>(x, kind, nranks, scalars);
    default:
      break;
  }
  const Format f = format_of(type);
  std::vector<float> values, factors;
  for (Bits raw : x) values.push_back(decode(f, raw));
  for (Bits raw : scalars) factors.push_back(decode(f, raw));
  return encode(f, float_result<float>(values, kind, nranks, factors));
}

// ---- One reduction, checked ----

struct Case {
  ncclDataType_t type;
  RedKind kind;
  int nranks;
  size_t n;
  std::vector<Bytes> in;
  std::vector<PreMul> scalars;

  int k() const { return static_cast<int>(in.size()); }
  size_t bytes() const { return n * type_size(type); }
};

Bits element(const void* array, size_t i, size_t size) {
  Bits raw = 0;
  std::memcpy(&raw, static_cast<const unsigned char*>(array) + i * size, size);
  return raw;
}

Bytes expected(const Case& c) {
  const size_t size = type_size(c.type);
  std::vector<Bits> scalars;
  for (const PreMul& s : c.scalars) scalars.push_back(element(s.bytes, 0, size));
  Bytes out(c.bytes());
  for (size_t i = 0; i < c.n; i++) {
    std::vector<Bits> x;
    for (const Bytes& input : c.in) x.push_back(element(input.data(), i, size));
    const Bits raw = result(c.type, x, c.kind, c.nranks, scalars);
    std::memcpy(&out[i * size], &raw, size);
  }
  return out;
}

// alias: the input that is the output too, or -1. shift: distance from an aligned address. One byte more than
// needed is left behind each buffer, to be found untouched.
Bytes actual(const Case& c, Isa isa, int alias, size_t shift) {
  std::vector<Bytes> copies;
  std::vector<const void*> in;
  for (const Bytes& input : c.in) {
    copies.emplace_back(shift + c.bytes() + 1, 0xa5);
    if (c.n) std::memcpy(&copies.back()[shift], input.data(), c.bytes());
  }
  for (const Bytes& copy : copies) in.push_back(copy.data() + shift);
  Bytes own(shift + c.bytes() + 1, 0xa5);
  Bytes& out = alias < 0 ? own : copies[static_cast<size_t>(alias)];
  reduce_on(isa, out.data() + shift, in.data(), c.k(), c.n, c.type, c.kind, c.nranks, c.scalars.data());
  if (out.back() != 0xa5) fail("wrote past the end", isa, c.type, c.kind, c.k(), c.n);
  for (size_t j = 0; j < copies.size(); j++) {
    const bool same = c.n == 0 || std::memcmp(&copies[j][shift], c.in[j].data(), c.bytes()) == 0;
    if (static_cast<int>(j) != alias && !same) fail("changed an input", isa, c.type, c.kind, c.k(), c.n);
  }
  const auto begin = out.begin() + static_cast<std::ptrdiff_t>(shift);
  return Bytes(begin, begin + static_cast<std::ptrdiff_t>(c.bytes()));
}

void check(const Case& c, bool placements = true) {
  const Bytes want = expected(c);
  for (Isa isa : kIsas) {
    if (!isa_supported(isa)) continue;
    if (actual(c, isa, -1, 0) != want) fail("result", isa, c.type, c.kind, c.k(), c.n);
    if (!placements) continue;
    if (actual(c, isa, -1, 1) != want) fail("unaligned", isa, c.type, c.kind, c.k(), c.n);
    for (int alias = 0; alias < c.k(); alias++) {
      if (actual(c, isa, alias, static_cast<size_t>(alias % 3)) != want) {
        fail("in place", isa, c.type, c.kind, c.k(), c.n);
      }
    }
  }
}

std::mt19937_64 rng(20240607);

// Any bits at all, so that NaNs, infinities, subnormals and extremes of the narrow types are among them.
Bytes random_bytes(size_t size) {
  Bytes bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(rng());
  return bytes;
}

// Numbers that the wide floats rarely hit by chance.
Bytes special_values(ncclDataType_t type, size_t n) {
  const double values[] = {0.0,   -0.0,     1,         -1,  5e-324, 1e-40, -1e-45f, 1e308,
                           -3e38, INFINITY, -INFINITY, NAN, -NAN,   0.1,   3};
  const size_t size = type_size(type);
  Bytes bytes(n * size);
  for (size_t i = 0; i < n; i++) {
    const double value = values[rng() % 15];
    const Bits raw = size == 8 ? put<double>(value) : put<float>(static_cast<float>(value));
    std::memcpy(&bytes[i * size], &raw, size);
  }
  return bytes;
}

Case random_case(ncclDataType_t type, RedKind kind, int k, size_t n) {
  Case c{type, kind, k + static_cast<int>(rng() % 3), n, {}, std::vector<PreMul>(static_cast<size_t>(k))};
  const bool wide = type == ncclFloat32 || type == ncclFloat64;
  for (int j = 0; j < k; j++) {
    c.in.push_back(wide && rng() % 2 ? special_values(type, n) : random_bytes(n * type_size(type)));
    std::memcpy(c.scalars[static_cast<size_t>(j)].bytes, random_bytes(8).data(), 8);
  }
  return c;
}

// ---- Tests ----

TEST_CASE("every combination") {
  for (int type = 0; type < ncclNumTypes; type++) {
    for (RedKind kind : kKinds) {
      for (int k : {1, 2, 3, 4, 9}) {
        for (size_t n : {0, 1, 15, 70, 1029})
          check(random_case(static_cast<ncclDataType_t>(type), kind, k, n));
      }
      check(random_case(static_cast<ncclDataType_t>(type), kind, 3, 9001));
    }
  }
}

Case pair(ncclDataType_t type, RedKind kind, const std::vector<Bits>& a, const std::vector<Bits>& b) {
  const size_t size = type_size(type);
  Case c{type, kind, 3, a.size(), {Bytes(a.size() * size), Bytes(a.size() * size)}, std::vector<PreMul>(2)};
  for (size_t i = 0; i < a.size(); i++) {
    std::memcpy(&c.in[0][i * size], &a[i], size);
    std::memcpy(&c.in[1][i * size], &b[i], size);
  }
  for (PreMul& s : c.scalars) std::memcpy(s.bytes, random_bytes(8).data(), 8);
  return c;
}

TEST_CASE("every float8 pair") {
  std::vector<Bits> a, b;
  for (Bits i = 0; i < 65536; i++) a.push_back(i >> 8), b.push_back(i & 255);
  for (ncclDataType_t type : {ncclFloat8e4m3, ncclFloat8e5m2}) {
    for (RedKind kind : kKinds) check(pair(type, kind, a, b), false);
  }
}

TEST_CASE("every float16 value") {
  std::vector<Bits> a, b;
  for (Bits i = 0; i < 65536; i++) a.push_back(i), b.push_back(rng() & 0xffff);
  for (ncclDataType_t type : {ncclFloat16, ncclBfloat16}) {
    for (RedKind kind : kKinds) check(pair(type, kind, a, b), false);
  }
}

TEST_CASE("integer average of extremes") {
  for (int type = ncclInt8; type <= ncclUint64; type++) {
    const int bits = 8 * static_cast<int>(type_size(static_cast<ncclDataType_t>(type)));
    const Bits top = Bits{1} << (bits - 1);
    std::vector<Bits> a{0, 1, 2, top - 1, top, top + 1, top - 2, ~Bits{0}, ~Bits{1}}, zero(a.size());
    for (int nranks : {1, 2, 3, 7, 127, 128, 255, 256, 65537, 2147483647}) {
      Case c = pair(static_cast<ncclDataType_t>(type), RedKind::Avg, a, zero);
      c.nranks = nranks;
      if (bits == 8 && nranks > 127) continue;  // the definition above divides in the type itself
      check(c);
    }
  }
}

TEST_CASE("known results") {
  const struct {
    ncclDataType_t type;
    RedKind kind;
    Bits a, b, want;
  } rows[] = {
      {ncclInt8, RedKind::Sum, 0x7f, 1, 0x80},
      {ncclInt8, RedKind::Max, 0xff, 1, 1},
      {ncclUint8, RedKind::Max, 0xff, 1, 0xff},
      {ncclFloat32, RedKind::Sum, 0x7f800000, 0xff800000, 0x7fc00000},
      {ncclFloat32, RedKind::Max, 0x7fc00001, 0x3f800000, 0x3f800000},
      {ncclFloat32, RedKind::Min, 0x00000000, 0x80000000, 0x80000000},
      {ncclFloat32, RedKind::Sum, 0x00000001, 0x00000001, 0x00000002},
      {ncclFloat16, RedKind::Sum, 0x7bff, 0x7bff, 0x7c00},
      {ncclFloat16, RedKind::Sum, 0x0001, 0x0001, 0x0002},
      {ncclBfloat16, RedKind::Sum, 0x3f80, 0x3b80, 0x3f80},  // a tie goes to even
      {ncclFloat8e4m3, RedKind::Sum, 0x7e, 0x7e, 0x7e},
      {ncclFloat8e4m3, RedKind::Sum, 0xfe, 0xff, 0x7f},
      {ncclFloat8e5m2, RedKind::Max, 0x7c, 0x00, 0x7b},
  };
  for (const auto& row : rows) {
    const Case c = pair(row.type, row.kind, {row.a}, {row.b});
    if (element(expected(c).data(), 0, type_size(row.type)) != row.want) {
      fail("definition", Isa::Baseline, row.type, row.kind, 2, 1);
    }
    check(c);
  }
}

// A thread that rounds upward, or flushes subnormals, gets the same bits and keeps its mode.
TEST_CASE("float mode of the caller") {
  const float in[2] = {1.0f, 1e-30f};
  const void* const pointers[2] = {&in[0], &in[1]};
  float out = 0;
  std::fesetround(FE_UPWARD);
  reduce(&out, pointers, 2, 1, ncclFloat32, RedKind::Sum, 2, nullptr);
  const bool kept = std::fegetround() == FE_UPWARD;
  std::fesetround(FE_TONEAREST);
  if (out != 1.0f || !kept) fail("rounding mode", Isa::Baseline, ncclFloat32, RedKind::Sum, 2, 1);
}

TEST_CASE("names") {
  const bool right = type_size(ncclBfloat16) == 2 && type_size(ncclFloat64) == 8 &&
                     type_size(ncclNumTypes) == 0 &&
                     std::strcmp(type_name(ncclFloat8e4m3), "float8_e4m3fn") == 0 &&
                     std::strcmp(type_name(ncclNumTypes), "unknown type") == 0 &&
                     std::strcmp(op_name(RedKind::PreMulSum), "pre_mul_sum") == 0;
  if (!right) fail("names", Isa::Baseline, ncclInt8, RedKind::Sum, 0, 0);
}

}  // namespace
