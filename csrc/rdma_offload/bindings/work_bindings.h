// What the engine's messages and a GPU's have in common for Python: waiting, and stamps.
#pragma once

#include <pybind11/pybind11.h>

#include "core/work.h"

namespace py = pybind11;

// Whether it ended within `seconds`; without the GIL.
bool wait(adaptra::Work& work, double seconds);
py::tuple stamps(const adaptra::Work& work);  // in seconds
void bind_work(py::module_& m);
