// How NCCL represents a tensor and a torch reduction, and the conversions before and after.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "task.hpp"

namespace pynccl {

using c10d::ReduceOp;

inline ncclDataType_t data_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return ncclInt8;
    case at::kByte:
    case at::kBool:
      return ncclUint8;
    case at::kInt:
      return ncclInt32;
    case at::kUInt32:
      return ncclUint32;
    case at::kLong:
      return ncclInt64;
    case at::kUInt64:
      return ncclUint64;
    case at::kHalf:
      return ncclFloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat8_e4m3fn:
      return ncclFloat8e4m3;
    case at::kFloat8_e5m2:
      return ncclFloat8e5m2;
    default:
      TORCH_CHECK_TYPE(false, "pynccl cannot reduce tensors of dtype ", type);
  }
}

inline const char* op_name(const ReduceOp& op) {
  static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op.op_ < 9 ? names[op.op_] : "UNUSED";
}

inline bool is_bitwise(const ReduceOp& op) {
  return op.op_ == ReduceOp::BAND || op.op_ == ReduceOp::BOR || op.op_ == ReduceOp::BXOR;
}

// As in torch a sum of booleans is true if any is true: bytes of 0 and 1.
inline ncclRedOp_t bool_operation(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
    case ReduceOp::BOR:
      return ncclMax;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::BAND:
      return ncclMin;
    default:
      TORCH_CHECK_TYPE(false, "Cannot use ReduceOp.", op_name(op), " with Bool");
  }
}

inline ncclRedOp_t operation(const ReduceOp& op, at::ScalarType type) {
  if (type == at::kBool) return bool_operation(op);
  switch (op.op_) {
    case ReduceOp::SUM:
      return ncclSum;
    case ReduceOp::PRODUCT:
      return ncclProd;
    case ReduceOp::MIN:
      return ncclMin;
    case ReduceOp::MAX:
      return ncclMax;
    case ReduceOp::PREMUL_SUM:
      return ncclSum;
    case ReduceOp::AVG:
      return ncclAvg;
    default:
      TORCH_CHECK_VALUE(false, "pynccl has no ReduceOp.", op_name(op));
  }
}

// Refuses operations that NCCL lacks before anything is issued.
inline void check_reduction(const ReduceOp& op, at::ScalarType type) {
  data_type(type), operation(op, type);
  if (op.op_ != ReduceOp::PREMUL_SUM) return;
  TORCH_CHECK_TYPE(at::isFloatingType(type), "PREMUL_SUM needs floating point, got ", type);
  TORCH_CHECK_VALUE(dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get()),
                    "PREMUL_SUM without a factor; make it with torch.distributed._make_nccl_premul_sum");
}

// A dense tensor with NCCL's elements: the tensor itself, a view, or a copy.
inline at::Tensor reducible(const at::Tensor& tensor, const ReduceOp& op) {
  at::Tensor t = tensor;
  if (t.is_complex()) {
    TORCH_CHECK_VALUE(op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM,
                      "all_reduce does not support ReduceOp.", op_name(op), " on complex tensors");
    t = at::view_as_real(t);
  }
  // NCCL has no 16-bit integers.
  if (t.scalar_type() == at::kShort || t.scalar_type() == at::kUInt16) t = t.to(at::kInt);
  check_reduction(op, t.scalar_type());
  return dense(t);
}

inline at::Tensor real_view(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

struct Reduction {
  ncclDataType_t type;
  ncclRedOp_t op;
  at::Tensor factor;  // of PREMUL_SUM

  Reduction(const Api& api, const ReduceOp& torch_op, const at::Tensor& wire)
      : type(data_type(wire.scalar_type())), op(operation(torch_op, wire.scalar_type())) {
    if (torch_op.op_ != ReduceOp::PREMUL_SUM) return;
    TORCH_CHECK(api.ncclRedOpCreatePreMulSum,
                "PREMUL_SUM needs NCCL " PYNCCL_SINCE_ncclRedOpCreatePreMulSum " or newer");
    auto* with = static_cast<c10d::NCCLPreMulSumSupplement*>(torch_op.supplement_.get());
    auto options = at::TensorOptions(wire.scalar_type()).device(at::kCPU);
    factor = with->tensor_factor.defined() ? with->tensor_factor.to(options)
                                           : at::full({1}, with->double_factor, options);
  }

  // Calls `f` with NCCL's operation.
  template <class Call>
  ncclResult_t with(const Api& api, ncclComm_t comm, Call call) const {
    if (!factor.defined()) return call(op);
    ncclRedOp_t made = ncclSum;
    ncclResult_t result =
        api.ncclRedOpCreatePreMulSum(&made, factor.data_ptr(), type, ncclScalarHostImmediate, comm);
    if (failed(result)) return result;
    result = call(made);
    api.ncclRedOpDestroy(made, comm);
    return result;
  }
};

// NCCL has no bitwise operations: gather the values of all ranks and reduce them here.
inline at::Tensor reduce_bitwise(const at::Tensor& rows, const ReduceOp& op) {
  at::Tensor result = rows[0].clone();
  for (int64_t r = 1; r < rows.size(0); ++r) {
    if (op.op_ == ReduceOp::BAND) result.bitwise_and_(rows[r]);
    if (op.op_ == ReduceOp::BOR) result.bitwise_or_(rows[r]);
    if (op.op_ == ReduceOp::BXOR) result.bitwise_xor_(rows[r]);
  }
  return result;
}

}  // namespace pynccl
