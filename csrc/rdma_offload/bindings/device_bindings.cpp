// GPUs for Python: memory and streams by their addresses. No call into the driver holds the GIL: any
// of them may wait for the GPU, as where its queue of launches is full, and that for other threads.
#include <pybind11/stl.h>
#include <unistd.h>

#include "bindings/work_bindings.h"
#include "gpu/device_messages.h"

using namespace adaptra;

namespace {

cuda::Stream stream(uintptr_t at) { return reinterpret_cast<cuda::Stream>(at); }

// A function of Python's for other threads; the last of them takes the GIL to release it.
OnCopied for_threads(const py::object& call) {
  if (call.is_none()) return {};
  std::shared_ptr<py::object> shared(new py::object(call), [](py::object* object) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete object;
  });
  return [shared](const TransferRef& transfer) {
    py::gil_scoped_acquire gil;
    try {
      (*shared)(transfer);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("on_copied of a message from a GPU");
    }
  };
}

// Closes before it goes, and without the GIL: the device's thread may be waiting for that.
struct Messages {
  Messages(Engine& engine, const std::shared_ptr<Device>& device,
           const std::shared_ptr<Pinned>& pinned, Tag tag_space, const std::vector<int>& peers,
           const std::string& name, uint64_t piece)
      : shared(DeviceMessages::open(engine, device, pinned, tag_space, peers, name, piece)) {}
  ~Messages() {
    if (getpid() != process) {  // a forked child has them without their thread
      new std::shared_ptr<DeviceMessages>(shared);
      return;
    }
    py::gil_scoped_release release;
    shared->close(kPatience);
    shared.reset();
  }
  static constexpr double kPatience = 10;  // seconds
  const pid_t process = getpid();
  std::shared_ptr<DeviceMessages> shared;
};

py::tuple copies(const DeviceMessages::Copies& copies) {
  return py::make_tuple(copies.count.load(), copies.bytes.load(), copies.nanoseconds * kNano);
}

}  // namespace

void bind_device(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  m.def("cuda_missing", &cuda_missing, NoGil());

  py::class_<Mark>(m, "Mark")
      .def("at", &Mark::at, NoGil())
      .def_property_readonly("fault", &Mark::fault)
      .def_property_readonly("recorded", &Mark::recorded);

  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def_static("open", &Device::open, NoGil())
      .def("close", &Device::close, NoGil())
      .def("pci", &Device::pci)
      .def("mark",
           [](const std::shared_ptr<Device>& device, uintptr_t at) {
             return std::make_unique<Mark>(device, stream(at));
           },
           NoGil())
      .def("anchor", [](Device& device, uintptr_t at) { device.anchor(stream(at)); }, NoGil())
      .def("anchors", [](Device& device) { return device.clock.anchors(); })
      .def("marks", [](Device& device) { return device.marks.load(); })
      .def("calls",
           [](Device& device) {
             return py::make_tuple(device.calls(Use::Messages), device.calls(Use::Marks),
                                   device.calls(Use::Others));
           })
      .def("fault", &Device::fault);

  py::class_<Pinned, std::shared_ptr<Pinned>>(m, "Pinned")
      .def(py::init([](const std::shared_ptr<Device>& device, Engine& engine, uint64_t limit) {
        return std::make_shared<Pinned>(device, engine.arena(), limit);
      }))
      .def("prepare",
           [](const std::shared_ptr<Pinned>& pinned, Device& device, uint64_t bytes, size_t count) {
             device.slowly([pinned, bytes, count] { pinned->prepare(bytes, count); });
           },
           NoGil())
      .def("reserve", &Pinned::reserve, NoGil())
      // Not on the device's thread: it may take long.
      .def("trim",
           [](const std::shared_ptr<Pinned>& pinned, Device& device, bool all) {
             device.slowly([pinned, all] { pinned->trim(all); });
           },
           NoGil())
      .def("close",
           [](const std::shared_ptr<Pinned>& pinned, Device& device) {
             if (!device.slowly([pinned] { pinned->close(); })) pinned->close();
           },
           NoGil())
      .def("bytes",
           [](const Pinned& pinned) {
             const auto bytes = pinned.bytes();
             return py::make_tuple(bytes.held, bytes.used, bytes.peak, bytes.over);
           })
      .def("new_peak", &Pinned::new_peak)
      .def("set_limit", &Pinned::set_limit)
      .def("copied", &Pinned::copied)
      .def("unpinned", &Pinned::unpinned);

  py::class_<Transfer, TransferRef>(m, "Transfer")
      .def("wait", [](Transfer& transfer, double seconds) { return wait(*transfer.work, seconds); })
      .def("done", [](Transfer& transfer) { return transfer.work->done(); })
      .def("error", [](Transfer& transfer) { return transfer.work->error(); })
      .def("stamps", [](Transfer& transfer) { return stamps(*transfer.work); })
      .def("over", [](Transfer& transfer) { return transfer.over.load(); });

  m.def("message_piece", [] { return DeviceMessages::kPiece; });
  py::class_<Messages>(m, "DeviceMessages")
      .def(py::init<Engine&, const std::shared_ptr<Device>&, const std::shared_ptr<Pinned>&, Tag,
                    const std::vector<int>&, const std::string&, uint64_t>(),
           py::keep_alive<1, 2>())
      .def("send",
           [](Messages& messages, int rank, Tag tag, cuda::Address at, uint64_t bytes,
              uintptr_t on, const py::object& on_copied) {
             auto call = for_threads(on_copied);
             py::gil_scoped_release release;
             return messages.shared->send(rank, tag, at, bytes, stream(on), std::move(call));
           })
      .def("receive",
           [](Messages& messages, int rank, Tag tag, cuda::Address at, uint64_t bytes,
              uintptr_t on) {
             return messages.shared->receive(rank, tag, at, bytes, stream(on));
           },
           NoGil())
      .def("release",
           [](Messages& messages, const TransferRef& one) { messages.shared->release(one); },
           NoGil())
      .def("join",
           [](Messages& messages, const TransferRef& one, uintptr_t on) {
             messages.shared->join(one, stream(on));
           },
           NoGil())
      .def("abort",
           [](Messages& messages, const TransferRef& one, double seconds) {
             return messages.shared->abort(one, seconds);
           },
           NoGil())
      .def("close",
           [](Messages& messages, double seconds) { return messages.shared->close(seconds); },
           NoGil())
      .def("copies", [](const Messages& messages) {
        return py::make_tuple(copies(messages.shared->copies[0]), copies(messages.shared->copies[1]));
      });
}
