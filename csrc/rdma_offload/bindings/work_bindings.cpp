#include "bindings/work_bindings.h"

#include <algorithm>

using namespace adaptra;

namespace {
constexpr double kPart = 0.1;  // seconds
}

// Between its parts Python looks for signals: Ctrl-C ends a wait.
bool wait(Work& work, double seconds) {
  const Nanoseconds begun = now();
  for (;;) {
    const double left = seconds - (now() - begun) * kNano;
    {
      py::gil_scoped_release release;
      if (work.wait(std::min(left, kPart))) return true;
    }
    if (left <= kPart) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

py::tuple stamps(const Work& work) {
  const Stamps& s = work.stamps;
  return py::make_tuple(s.sent * kNano, s.left * kNano, s.posted * kNano, s.completed * kNano);
}

void bind_work(py::module_& m) {
  py::class_<Work, WorkRef>(m, "Work")
      .def("wait", &wait, py::arg("seconds"))
      .def("done", &Work::done)
      .def("error", &Work::error)
      .def("stamps", &stamps);
}
