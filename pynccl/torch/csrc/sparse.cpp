// Messages of sparse tensors, which the backend refuses. torch's dispatcher has no kernels for them and
// raises inside of a batch; its record of the batch then stays open, and torch only records the later
// collectives of the group, without running them.
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend.hpp"

namespace pynccl {
namespace {

using Group = intrusive_ptr<c10d::ProcessGroup>;

Backend& backend_of(const Group& group, at::TensorList tensors, const char* function) {
  auto* backend = dynamic_cast<Backend*>(group->getBackend(tensors[0].device().type()).get());
  TORCH_CHECK_NOT_IMPLEMENTED(backend, function, ": tensor has layout ", tensors[0].layout(),
                              ", which the group's backend does not support");
  return *backend;
}

WorkPtr send_sparse(at::TensorList tensors, const Group& group, int64_t dst, int64_t tag) {
  Tensors all = tensors.vec();
  return backend_of(group, tensors, "send").send(all, int(dst), int(tag));
}

WorkPtr recv_sparse(at::TensorList tensors, const Group& group, int64_t src, int64_t tag) {
  Tensors all = tensors.vec();
  return backend_of(group, tensors, "recv").recv(all, int(src), int(tag));
}

void implement(torch::Library& library) {
  library.impl("send", send_sparse);
  library.impl("recv_", recv_sparse);
}

TORCH_LIBRARY_IMPL(c10d, SparseCPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(c10d, SparseCUDA, library) { implement(library); }
TORCH_LIBRARY_IMPL(c10d, SparseCsrCPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(c10d, SparseCsrCUDA, library) { implement(library); }

}  // namespace
}  // namespace pynccl
