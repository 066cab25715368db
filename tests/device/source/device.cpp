// A device named "cuda" in a torch that was built without CUDA, for tests: what a program does on a GPU can be run and
// counted, with true numbers. `streams.h`, `memory.h`, `kernels.h` and `collectives.h`, in this order, say how; this
// file is what Python sees of it. Own code, none of torch's in it.
#include <torch/extension.h>
#include <torch/csrc/utils/pybind.h>
#include "collectives.h"

static PyObject* listener = nullptr;
static void tell(const std::string& what) {
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::function>(listener)(what);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("is_there", [] { return at::hasCUDA(); }, "Whether torch has found the hooks");
  m.def("on_wait", [](py::function f) { listener = f.release().ptr(); on_wait = &tell; }, "Call f(operation) for each wait of the host");
  m.def("catch_up", [] { order().catch_up(); }, "The device has done all that was queued so far");
  m.def("hang", [] { hangs = true; }, "From now on no event comes");
  m.def("take_races", [] { return order().take_races(); }, "Uses of the same memory by streams in no order, since the last call");
  m.def("resize_storage", [](const Tensor& t, size_t n) { own::resize_storage(t.storage().unsafeGetStorageImpl(), n); });
  m.def("like_nccl", [](c10::intrusive_ptr<c10d::Backend> gloo) { return c10::make_intrusive<LikeNccl>(std::move(gloo)); });
  py::class_<LikeNccl, c10d::Backend, c10::intrusive_ptr<LikeNccl>>(m, "LikeNccl")
      .def_property_readonly("options", [](LikeNccl& b) { return b.getBackendOptions(); })
      .def("_set_sequence_number_for_group", [](LikeNccl&) {});
}
