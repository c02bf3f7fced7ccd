// c10d's collectives in NCCL's terms.
#include "backend.hpp"

namespace pynccl {
namespace {

using NoGrad = at::AutoDispatchBelowADInplaceOrView;

const at::Tensor& only(const Tensors& tensors, const char* function) {
  TORCH_CHECK_VALUE(tensors.size() == 1, function, " takes one tensor, got ", tensors.size());
  TORCH_CHECK_VALUE(tensors[0].layout() == at::kStrided, function, ": tensor has layout ",
                    tensors[0].layout(), ", expected a dense tensor");
  return tensors[0];
}

Call call_on(OpType type, std::string name, const at::Tensor& tensor) {
  Call call;
  call.type = type, call.name = std::move(name), call.device = tensor.device();
  return call;
}

void check_dtypes(const char* function, const at::Tensor& output, const at::Tensor& input) {
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), function, ": output tensor has dtype ",
                   output.scalar_type(), ", input ", input.scalar_type());
  TORCH_CHECK_VALUE(output.device() == input.device(), function, ": output tensor is on ", output.device(),
                    ", input on ", input.device());
}

// The memory into which an output is received: its own if it is contiguous.
at::Tensor landing(const at::Tensor& output) {
  return output.is_contiguous() ? dense(output) : at::empty_like(output, at::MemoryFormat::Contiguous);
}

void copy_back(const at::Tensor& output, const at::Tensor& landed) {
  if (!landed.is_alias_of(output)) output.copy_(landed);
}

Tensors landings(const Tensors& outputs) {
  Tensors all;
  for (auto& output : outputs) all.push_back(landing(output));
  return all;
}

Tensors contiguous(const Tensors& inputs) {
  Tensors all;
  for (auto& input : inputs) all.push_back(dense(input));
  return all;
}

void copy_back(const Tensors& outputs, const Tensors& landed) {
  for (size_t i = 0; i < outputs.size(); ++i) copy_back(outputs[i], landed[i]);
}

bool same_sizes(const Tensors& tensors, const at::Tensor& like) {
  return std::all_of(tensors.begin(), tensors.end(), [&](auto& t) { return t.numel() == like.numel(); });
}

// Pieces of a tensor along its first axis; of equal size if no sizes are given.
Tensors pieces(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size, const char* name) {
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) % size == 0,
                      "Tensor's dim 0 does not divide equally across group size: ", name, " has shape ",
                      tensor.sizes(), ", the group ", size, " ranks");
    return tensor.chunk(size).size() == size_t(size) ? tensor.chunk(size) : Tensors(size_t(size), tensor);
  }
  TORCH_CHECK_VALUE(int(splits.size()) == size, "Number of tensor splits not equal to group size: ", name,
                    " has ", splits.size(), ", the group ", size, " ranks");
  int64_t sum = 0;
  for (int64_t n : splits) sum += n;
  TORCH_CHECK_VALUE(tensor.dim() > 0 && sum == tensor.size(0),
                    "Split sizes doesn't match total dim 0 size: ", name, " has shape ", tensor.sizes(),
                    ", its splits sum to ", sum);
  return tensor.split_with_sizes(splits);
}

}  // namespace

void Backend::check_root(int64_t root, const char* function) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, function, ": invalid root rank: ", root, ", expected 0 to ",
                    size_ - 1);
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) try {
  NoGrad no_grad;
  auto& tensor = only(tensors, "broadcast");
  check_root(options.rootRank, "broadcast");
  Call call = call_on(OpType::BROADCAST, "broadcast", tensor);
  at::Tensor data = dense(tensor);
  call.inputs = call.outputs = {tensor};
  call.kept = {data};
  call.other = int(options.rootRank);
  call.issue = [data, root = int(options.rootRank)](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return api.ncclBroadcast(data.data_ptr(), data.data_ptr(), data.nbytes(), ncclUint8, root, comm, stream);
  };
  if (!data.is_alias_of(tensor)) call.post = [tensor = tensor, data] { tensor.copy_(data); };
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

// Every rank gathers all inputs and reduces its slice (-1: the whole).
Call Backend::bitwise_call(const at::Tensor& input, const at::Tensor& output, const ReduceOp& op,
                           int64_t slice) const {
  TORCH_CHECK_TYPE(at::isIntegralType(input.scalar_type(), true), "Cannot use ReduceOp.", op_name(op),
                   " with non-integral dtype ", input.scalar_type());
  Call call = call_on(OpType::ALLREDUCE, "all_reduce", input);
  at::Tensor data = dense(input);
  at::Tensor rows = at::empty({size_, data.numel()}, data.options());
  call.inputs = {input}, call.outputs = {output}, call.kept = {data, rows};
  call.issue = [data, rows](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return api.ncclAllGather(data.data_ptr(), rows.data_ptr(), data.nbytes(), ncclUint8, comm, stream);
  };
  call.post = [rows, output, op, slice] {
    at::Tensor part = slice < 0 ? rows : rows.narrow(1, slice * output.numel(), output.numel());
    output.copy_(reduce_bitwise(part, op).view(output.sizes()));
  };
  return call;
}

Call Backend::all_reduce_call(const at::Tensor& tensor, const ReduceOp& op) const {
  if (is_bitwise(op) && tensor.scalar_type() != at::kBool) return bitwise_call(tensor, tensor, op, -1);
  at::Tensor data = reducible(tensor, op);
  Call call = call_on(OpType::ALLREDUCE, "all_reduce", tensor);
  call.inputs = call.outputs = {tensor};
  call.kept = {data};
  call.issue = [data, size = size_t(data.numel()), op](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    Reduction reduction(api, op, data);
    return reduction.with(api, comm, [&](ncclRedOp_t made) {
      return api.ncclAllReduce(data.data_ptr(), data.data_ptr(), size, reduction.type, made, comm, stream);
    });
  };
  if (!data.is_alias_of(tensor)) call.post = [tensor, data] { real_view(tensor).copy_(data); };
  return call;
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) try {
  NoGrad no_grad;
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  return launch(all_reduce_call(only(tensors, "all_reduce"), options.reduceOp), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(!tensors.empty(), "allreduce_coalesced: requires non-empty tensor list");
  std::vector<Call> calls;
  for (auto& tensor : tensors) calls.push_back(all_reduce_call(tensor, options.reduceOp));
  return launch(merged(std::move(calls), OpType::ALLREDUCE_COALESCED, "allreduce_coalesced"), options);
} catch (...) {
  return refused();
}

// As in gloo only sums, and the call blocks. Gathers the indices and values of every rank and coalesces them.
WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(options.reduceOp.op_ == ReduceOp::SUM, "sparse all_reduce has ReduceOp.SUM only, got ",
                    op_name(options.reduceOp));
  TORCH_CHECK((entered(), !coalesced_), "sparse all_reduce cannot be coalesced");
  at::Tensor tensor = tensors.at(0), mine = tensor.coalesce();
  auto gathered = [&](const at::Tensor& input, const std::vector<int64_t>& rows) {
    Tensors outputs;
    for (int64_t n : rows) {
      auto shape = input.sizes().vec();
      shape[0] = n;
      outputs.push_back(at::empty(shape, input.options()));
    }
    launch(all_gather_list_call(outputs, input), options.timeout, Pace::Awaited)->wait();
    return outputs;
  };
  at::Tensor count = at::full({1}, mine._nnz(), at::kLong);
  std::vector<int64_t> counts;
  for (auto& n : gathered(count, std::vector<int64_t>(size_t(size_), 1))) counts.push_back(n.item<int64_t>());
  auto indices = gathered(mine._indices().t().contiguous(), counts);
  auto values = gathered(mine._values().contiguous(), counts);
  auto sum = at::sparse_coo_tensor(at::cat(indices).t(), at::cat(values), tensor.sizes(), tensor.options())
                 .coalesce();
  tensor.copy_(sum);
  auto task = std::make_shared<Task>();
  task->outputs = {tensor};
  task->succeed();
  auto lock = entered();
  return work_of(OpType::_ALLREDUCE_SPARSE, "all_reduce", {task});
} catch (...) {
  return refused();
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) try {
  NoGrad no_grad;
  auto& tensor = only(tensors, "reduce");
  check_root(options.rootRank, "reduce");
  int root = int(options.rootRank);
  ReduceOp op = options.reduceOp;
  Call call;
  if (is_bitwise(op) && tensor.scalar_type() != at::kBool) {
    call = bitwise_call(tensor, tensor, op, -1);
  } else {
    at::Tensor data = reducible(tensor, op);
    call = call_on(OpType::REDUCE, "reduce", tensor);
    call.inputs = call.outputs = {tensor}, call.kept = {data};
    call.issue = [data, op, root](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      Reduction reduction(api, op, data);
      return reduction.with(api, comm, [&](ncclRedOp_t made) {
        return api.ncclReduce(data.data_ptr(), data.data_ptr(), size_t(data.numel()), reduction.type, made,
                              root, comm, stream);
      });
    };
    if (!data.is_alias_of(tensor)) call.post = [tensor = tensor, data] { real_view(tensor).copy_(data); };
  }
  call.type = OpType::REDUCE, call.name = "reduce", call.other = root;
  if (rank_ != root) call.post = nullptr;
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

Call Backend::all_gather_call(const at::Tensor& output, const at::Tensor& input) const {
  check_dtypes("all_gather_into_tensor", output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_,
                    "output tensor size must be equal to world_size times input tensor size: output has ",
                    output.numel(), " elements, input ", input.numel(), ", the group ", size_, " ranks");
  Call call = call_on(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", input);
  at::Tensor data = dense(input), landed = landing(output);
  call.inputs = {input}, call.outputs = {output}, call.kept = {data, landed};
  call.issue = [data, landed](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return api.ncclAllGather(data.data_ptr(), landed.data_ptr(), data.nbytes(), ncclUint8, comm, stream);
  };
  if (!landed.is_alias_of(output)) call.post = [output, landed] { output.copy_(landed); };
  return call;
}

Call Backend::all_gather_list_call(const Tensors& outputs, const at::Tensor& input) const {
  TORCH_CHECK_VALUE(int(outputs.size()) == size_, "all_gather: invalid output tensor list: ", outputs.size(),
                    " tensors, expected ", size_);
  for (auto& output : outputs) check_dtypes("all_gather", output, input);
  TORCH_CHECK_VALUE(outputs[size_t(rank_)].numel() == input.numel(), "all_gather: output tensor ", rank_,
                    " has ", outputs[size_t(rank_)].numel(), " elements, this rank's input ", input.numel());
  Call call = call_on(OpType::ALLGATHER, "all_gather", input);
  at::Tensor data = dense(input);
  call.inputs = {input}, call.outputs = outputs;
  if (same_sizes(outputs, input)) {
    at::Tensor rows = at::empty({size_, data.numel()}, data.options());
    call.kept = {data, rows};
    call.issue = [data, rows](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      return api.ncclAllGather(data.data_ptr(), rows.data_ptr(), data.nbytes(), ncclUint8, comm, stream);
    };
    call.post = [outputs, rows] {
      for (size_t r = 0; r < outputs.size(); ++r) outputs[r].copy_(rows[int64_t(r)].view(outputs[r].sizes()));
    };
    return call;
  }
  Tensors landed = landings(outputs);
  call.kept = landed;
  call.kept.push_back(data);
  call.issue = [data, landed, rank = rank_](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return grouped(api, [&] {
      for (int r = 0; r < int(landed.size()); ++r) {
        auto& to = landed[size_t(r)];
        auto result = api.ncclBroadcast(r == rank ? data.data_ptr() : to.data_ptr(), to.data_ptr(),
                                        to.nbytes(), ncclUint8, r, comm, stream);
        if (failed(result)) return result;
      }
      return ncclSuccess;
    });
  };
  call.post = [outputs, landed] { copy_back(outputs, landed); };
  return call;
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) try {
  NoGrad no_grad;
  auto& input = only(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather takes one output list, got ", outputs.size());
  return launch(all_gather_list_call(outputs[0], input), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& options) try {
  NoGrad no_grad;
  return launch(all_gather_call(output, input), options);
} catch (...) {
  return refused();
}

// outputs[rank][i] receives that rank's inputs[i].
WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(int(outputs.size()) == size_, "all_gather_coalesced: ", outputs.size(),
                    " output lists, expected ", size_);
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors row;
    for (auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: output list of ", list.size(),
                        " tensors, expected ", inputs.size());
      row.push_back(list[i]);
    }
    calls.push_back(all_gather_list_call(row, inputs[i]));
  }
  TORCH_CHECK_VALUE(!calls.empty(), "all_gather_coalesced: requires non-empty tensor list");
  return launch(merged(std::move(calls), OpType::ALLGATHER_COALESCED, "all_gather_coalesced"), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "all_gather_into_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) calls.push_back(all_gather_call(outputs[i], inputs[i]));
  return launch(merged(std::move(calls), OpType::COALESCED, "all_gather_into_tensor_coalesced"), options);
} catch (...) {
  return refused();
}

Call Backend::reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceOp& op) const {
  check_dtypes("reduce_scatter_tensor", output, input);
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_,
                    "input tensor must be the same size as output size times world size: input has ",
                    input.numel(), " elements, output ", output.numel(), ", the group ", size_, " ranks");
  Call call;
  if (is_bitwise(op) && input.scalar_type() != at::kBool) {
    call = bitwise_call(input, output, op, rank_);
  } else {
    at::Tensor data = reducible(input, op), landed = reducible(output, op);
    call = call_on(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", input);
    call.inputs = {input}, call.outputs = {output}, call.kept = {data, landed};
    call.issue = [data, landed, op](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      Reduction reduction(api, op, data);
      return reduction.with(api, comm, [&](ncclRedOp_t made) {
        return api.ncclReduceScatter(data.data_ptr(), landed.data_ptr(), size_t(landed.numel()),
                                     reduction.type, made, comm, stream);
      });
    };
    if (!landed.is_alias_of(output)) call.post = [output, landed] { real_view(output).copy_(landed); };
  }
  call.type = OpType::_REDUCE_SCATTER_BASE, call.name = "reduce_scatter_tensor";
  return call;
}

Call Backend::reduce_scatter_list_call(const at::Tensor& output, const Tensors& inputs,
                                       const ReduceOp& op) const {
  TORCH_CHECK_VALUE(int(inputs.size()) == size_, "reduce_scatter: invalid input tensor list: ", inputs.size(),
                    " tensors, expected ", size_);
  Call call;
  if (same_sizes(inputs, output)) {
    Tensors flat;
    for (auto& input : inputs) flat.push_back(input.reshape({-1}));
    call = reduce_scatter_call(output, at::cat(flat), op);
  } else {
    TORCH_CHECK_VALUE(inputs[size_t(rank_)].numel() == output.numel(), "reduce_scatter: input tensor ", rank_,
                      " has ", inputs[size_t(rank_)].numel(), " elements, this rank's output ",
                      output.numel());
    call = call_on(OpType::REDUCE_SCATTER, "reduce_scatter", output);
    TORCH_CHECK_VALUE(!is_bitwise(op), "reduce_scatter of uneven tensors has no ReduceOp.", op_name(op));
    at::Tensor landed = reducible(output, op);
    for (auto& input : inputs) call.kept.push_back(reducible(input, op));
    auto rows = call.kept;
    call.kept.push_back(landed);
    call.issue = [rows, landed, op](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      Reduction reduction(api, op, landed);
      return reduction.with(api, comm, [&](ncclRedOp_t made) {
        return grouped(api, [&] {
          for (int r = 0; r < int(rows.size()); ++r) {
            auto& row = rows[size_t(r)];
            auto result = api.ncclReduce(row.data_ptr(), landed.data_ptr(), size_t(row.numel()),
                                         reduction.type, made, r, comm, stream);
            if (failed(result)) return result;
          }
          return ncclSuccess;
        });
      });
    };
    if (!landed.is_alias_of(output)) call.post = [output, landed] { real_view(output).copy_(landed); };
    call.outputs = {output};
  }
  call.inputs = inputs;
  call.type = OpType::REDUCE_SCATTER, call.name = "reduce_scatter";
  return call;
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options) try {
  NoGrad no_grad;
  auto& output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "reduce_scatter takes one input list, got ", inputs.size());
  return launch(reduce_scatter_list_call(output, inputs[0], options.reduceOp), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) try {
  NoGrad no_grad;
  return launch(reduce_scatter_call(output, input, options.reduceOp), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "reduce_scatter_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(reduce_scatter_call(outputs[i], inputs[i], options.reduceOp));
  return launch(merged(std::move(calls), OpType::COALESCED, "reduce_scatter_tensor_coalesced"), options);
} catch (...) {
  return refused();
}

namespace {

struct Range {
  const char *begin, *end;
  bool overlaps(const Range& other) const {
    return begin != end && other.begin != other.end && begin < other.end && other.begin < end;
  }
  bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

Range range_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, nullptr};
  auto begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + tensor.nbytes()};
}

Range range_of(const Tensors& tensors) {
  Range all{nullptr, nullptr};
  for (auto& tensor : tensors) {
    Range one = range_of(tensor);
    if (one.begin == one.end) continue;
    all = all.begin ? Range{std::min(all.begin, one.begin), std::max(all.end, one.end)} : one;
  }
  return all;
}

// Raises if a message would overwrite another one's data. What goes to a rank and comes from it may be in the
// same place. sent[0] goes to rank `first_sent`, and landed[0] comes from `first_landed`.
void check_separate(const char* name, const Tensors& sent, int first_sent, const Tensors& landed,
                    int first_landed) {
  if (!range_of(sent).overlaps(range_of(landed))) return;
  for (size_t s = 0; s < sent.size(); ++s)
    for (size_t l = 0; l < landed.size(); ++l) {
      Range from = range_of(sent[s]), to = range_of(landed[l]);
      bool in_place = int(s) + first_sent == int(l) + first_landed && from == to;
      TORCH_CHECK_VALUE(!from.overlaps(to) || in_place, name, ": input ", s, " and output ", l,
                        " overlap; expected separate memory, or the same for one rank");
    }
}

}  // namespace

// Sends inputs[r] to rank r and receives outputs[r] from it. Lists may be empty, or have undefined tensors
// for ranks without data.
Call Backend::all_to_all_call(const Tensors& outputs, const Tensors& inputs) const {
  Call call = call_on(OpType::ALLTOALL, "all_to_all", outputs.empty() ? inputs.at(0) : outputs.at(0));
  Tensors sent = contiguous(inputs), landed = landings(outputs);
  check_separate("all_to_all", sent, 0, landed, 0);
  call.inputs = inputs, call.outputs = outputs;
  call.kept = sent;
  call.kept.insert(call.kept.end(), landed.begin(), landed.end());
  call.issue = [sent, landed](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return grouped(api, [&] {
      ncclResult_t result = ncclSuccess;
      for (size_t r = 0; r < sent.size() && !failed(result); ++r)
        result = api.ncclSend(sent[r].data_ptr(), sent[r].nbytes(), ncclUint8, int(r), comm, stream);
      for (size_t r = 0; r < landed.size() && !failed(result); ++r)
        result = api.ncclRecv(landed[r].data_ptr(), landed[r].nbytes(), ncclUint8, int(r), comm, stream);
      return result;
    });
  };
  call.post = [outputs, landed] { copy_back(outputs, landed); };
  return call;
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) try {
  NoGrad no_grad;
  TORCH_CHECK_VALUE(int(outputs.size()) == size_ && int(inputs.size()) == size_,
                    "all_to_all: ", outputs.size(), " outputs and ", inputs.size(), " inputs, expected ",
                    size_, " each");
  return launch(all_to_all_call(outputs, inputs), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) try {
  NoGrad no_grad;
  check_dtypes("all_to_all_single", output, input);
  at::Tensor landed = landing(output);
  Tensors to = pieces(landed, output_splits, size_, "output"),
          from = pieces(input, input_splits, size_, "input");
  Call call = all_to_all_call(to, from);
  call.type = OpType::ALLTOALL_BASE;
  call.inputs = {input}, call.outputs = {output};
  call.input_splits = input_splits, call.output_splits = output_splits;
  call.kept.push_back(landed);
  if (!landed.is_alias_of(output)) call.post = [output, landed] { output.copy_(landed); };
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& options) try {
  NoGrad no_grad;
  auto& input = only(inputs, "gather");
  check_root(options.rootRank, "gather");
  bool root = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(root ? outputs.size() == 1 && int(outputs[0].size()) == size_ : outputs.empty(),
                    "gather: the root needs one output list of ", size_, " tensors, other ranks none");
  Tensors landed = root ? landings(outputs[0]) : Tensors();
  at::Tensor data = dense(input);
  check_separate("gather", {data}, rank_, landed, 0);
  Call call = call_on(OpType::GATHER, "gather", input);
  call.inputs = {input};
  if (root) call.outputs = outputs[0];
  call.other = int(options.rootRank);
  call.kept = landed;
  call.kept.push_back(data);
  call.issue = [landed, data, to = int(options.rootRank)](const Api& api, ncclComm_t comm,
                                                          cudaStream_t stream) {
    return grouped(api, [&] {
      ncclResult_t result = api.ncclSend(data.data_ptr(), data.nbytes(), ncclUint8, to, comm, stream);
      for (size_t r = 0; r < landed.size() && !failed(result); ++r)
        result = api.ncclRecv(landed[r].data_ptr(), landed[r].nbytes(), ncclUint8, int(r), comm, stream);
      return result;
    });
  };
  if (root) call.post = [outputs = outputs[0], landed] { copy_back(outputs, landed); };
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& options) try {
  NoGrad no_grad;
  auto& output = only(outputs, "scatter");
  check_root(options.rootRank, "scatter");
  bool root = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(root ? inputs.size() == 1 && int(inputs[0].size()) == size_ : inputs.empty(),
                    "scatter: the root needs one input list of ", size_, " tensors, other ranks none");
  Tensors sent = root ? contiguous(inputs[0]) : Tensors();
  at::Tensor landed = landing(output);
  check_separate("scatter", sent, 0, {landed}, rank_);
  Call call = call_on(OpType::SCATTER, "scatter", output);
  if (root) call.inputs = inputs[0];
  call.other = int(options.rootRank);
  call.outputs = {output};
  call.kept = sent;
  call.kept.push_back(landed);
  call.issue = [sent, landed, from = int(options.rootRank)](const Api& api, ncclComm_t comm,
                                                            cudaStream_t stream) {
    return grouped(api, [&] {
      ncclResult_t result = ncclSuccess;
      for (size_t r = 0; r < sent.size() && !failed(result); ++r)
        result = api.ncclSend(sent[r].data_ptr(), sent[r].nbytes(), ncclUint8, int(r), comm, stream);
      if (failed(result)) return result;
      return api.ncclRecv(landed.data_ptr(), landed.nbytes(), ncclUint8, from, comm, stream);
    });
  };
  if (!landed.is_alias_of(output)) call.post = [output = output, landed] { output.copy_(landed); };
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

c10::Device Backend::barrier_device(const c10d::BarrierOptions& options) {
  auto lock = entered();
  if (options.device && options.device->is_cuda() && options.device->has_index()) return *options.device;
  if (!options.device_ids.empty() && !lanes_.count("cpu"))
    return c10::Device(at::kCUDA, c10::DeviceIndex(options.device_ids[0]));
  if (bound_device_id_ && bound_device_id_->is_cuda()) return *bound_device_id_;
  if (lanes_.empty() || lanes_.count("cpu")) return at::kCPU;
  return lanes_.begin()->second->device;
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) try {
  NoGrad no_grad;
  auto flag = at::zeros({1}, at::TensorOptions(at::kByte).device(barrier_device(options)));
  Call call = all_reduce_call(flag, ReduceOp(ReduceOp::MAX));
  call.type = OpType::BARRIER, call.name = "barrier";
  call.inputs.clear(), call.outputs.clear(), call.kept = {flag};
  return launch(std::move(call), options);
} catch (...) {
  return refused();
}

}  // namespace pynccl
