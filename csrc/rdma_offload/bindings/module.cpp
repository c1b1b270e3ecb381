#include "bindings/bind.h"

PYBIND11_MODULE(_native, m) {
  bind_work(m);
  bind_engine(m);
  bind_device(m);
}
