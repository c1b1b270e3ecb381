#include "bindings/work_bindings.h"

void bind_engine(py::module_& m);
void bind_device(py::module_& m);

PYBIND11_MODULE(_native, m) {  // what is bound first is known to what follows
  bind_work(m);
  bind_engine(m);
  bind_device(m);
}
