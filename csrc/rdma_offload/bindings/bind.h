// The parts of the Python module, in the order in which it is put together.
#pragma once

#include <pybind11/pybind11.h>

void bind_work(pybind11::module_& m);
void bind_engine(pybind11::module_& m);  // after work
void bind_device(pybind11::module_& m);  // after the engine
