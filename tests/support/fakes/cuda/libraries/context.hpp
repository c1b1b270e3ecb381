// Which device a thread works on: the same for runtime and driver. A context is a device's primary one.
#pragma once

namespace fake_cuda {

struct Context {
  int device;
  int retained = 0;
};

Context* primary(int device);          // null for a device that there is not
Context* current_context();            // null before the thread has chosen
void set_current(Context*);
int current_device();                  // for the runtime, which chooses device 0 by itself
bool initialised();
void initialise();
void* driver_function(const char* name);  // of this library, the newest version of it; null if there is none

}  // namespace fake_cuda
