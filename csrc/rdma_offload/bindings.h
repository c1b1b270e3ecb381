// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include "work.h"

namespace py = pybind11;

constexpr double kNano = 1e-9;

// Whether it ended within `seconds`; without the GIL.
bool wait(adaptra::Work& work, double seconds);
py::tuple stamps(const adaptra::Work& work);  // in seconds

void bind_device(py::module_& m);  // after the engine
