// The extension module. It is one translation unit, so that torch's headers are compiled once.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.cpp"
#include "collectives.cpp"
#include "meeting.cpp"
#include "monitored_barrier.cpp"
#include "p2p.cpp"
#include "reconfigure.cpp"
#include "sparse.cpp"
#include "window.cpp"

namespace py = pybind11;

namespace {
// What Python provides is called until the process ends.
py::function* never_freed(const py::function& function) { return new py::function(function); }
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  using Options = pynccl::Backend::Options;
  py::class_<pynccl::Backend, c10d::Backend, c10::intrusive_ptr<pynccl::Backend>> backend(m, "Backend");
  // torch copies a group's options before it splits the group.
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(backend, "Options")
      .def(py::init([](std::chrono::milliseconds timeout, bool high_priority) {
             return c10::make_intrusive<Options>(timeout, high_priority);
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def("__copy__", [](const Options& options) { return c10::make_intrusive<Options>(options); })
      .def("__deepcopy__",
           [](const Options& options, const py::dict&) { return c10::make_intrusive<Options>(options); });
  backend
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, bool cpu_only, std::string name,
                       std::vector<int64_t> ranks, bool high_priority) {
             auto made = pynccl::Backend::make(store, rank, size, Options(timeout, high_priority), cpu_only,
                                               {std::move(name), std::move(ranks)});
             // With CUDA devices a group may never get a cpu tensor.
             if (cpu_only && store) made->eagerConnectSingleDevice(at::kCPU);
             return made;
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("cpu_only"),
           py::arg("name") = "", py::arg("ranks") = std::vector<int64_t>(), py::arg("high_priority") = false,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &pynccl::Backend::getBackendOptions)
      // torch calls this on ranks outside a new group. They need do nothing: the group connects through the
      // store.
      .def("perform_nocolor_split", [](pynccl::Backend&, const c10::Device&) {})
      .def("_set_default_timeout", &pynccl::Backend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("comm_split_count", &pynccl::Backend::splits)
      .def("abort", &pynccl::Backend::abort, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &pynccl::Backend::shutdown, py::call_guard<py::gil_scoped_release>());
  m.def("end_all", &pynccl::Backend::end_all, py::call_guard<py::gil_scoped_release>());
  m.def("set_provider", [](py::function provider) {
    auto* kept = never_freed(provider);
    pynccl::provide = [kept](c10::Device device, bool high_priority) {
      py::gil_scoped_acquire gil;
      auto given = (*kept)(device.is_cpu() ? "cpu" : "cuda", int(device.index()), high_priority)
                       .cast<std::tuple<std::map<std::string, uintptr_t>, int64_t, uintptr_t>>();
      return pynccl::Provided{std::get<0>(given), std::get<1>(given), std::get<2>(given)};
    };
  });
  m.def("set_allocator", [](const py::function& allocates, const py::function& allocate) {
    pynccl::allocates = [kept = never_freed(allocates)](c10::DeviceIndex device) {
      py::gil_scoped_acquire gil;
      return (*kept)(int(device)).cast<bool>();
    };
    pynccl::allocate = [kept = never_freed(allocate)](int64_t size, const at::TensorOptions& options) {
      py::gil_scoped_acquire gil;
      return (*kept)(size, c10::typeMetaToScalarType(options.dtype()), options.device()).cast<at::Tensor>();
    };
  });
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  m.def("set_meeting", [](const py::function& serve, const py::function& join) {
    pynccl::serve = [kept = never_freed(serve)] {
      py::gil_scoped_acquire gil;
      auto [store, handle] = (*kept)().cast<std::tuple<StorePtr, std::string>>();
      return pynccl::Served{store, handle};
    };
    pynccl::join = [kept = never_freed(join)](const pynccl::Served& served, int64_t uuid,
                                              const std::vector<std::string>& handles,
                                              pynccl::Milliseconds limit, const std::string& group) {
      py::gil_scoped_acquire gil;
      auto [store, rank, size] =
          (*kept)(served.store, served.handle, uuid, handles, double(limit.count()) / 1e3, group)
              .cast<std::tuple<StorePtr, int, int>>();
      return pynccl::Joined{store, rank, size};
    };
  });
}
