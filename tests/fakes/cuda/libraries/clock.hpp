// The clock of the devices, which events show: another one than the host's, as fast as a test says.
#pragma once

namespace fake_cuda {

double device_time(double host);  // seconds of the devices' clock at a moment of the host's

}  // namespace fake_cuda
