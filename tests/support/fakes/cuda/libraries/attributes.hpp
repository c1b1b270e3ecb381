// What a device of the fake is like. Numbers of attributes are CUDA's, the same for runtime and driver.
#pragma once
#include <cstddef>
#include <cstdio>

#include "options.hpp"

namespace fake_cuda {

constexpr int version = 13000, major = 8, minor = 0;
constexpr int least_priority = 0, greatest_priority = -5;

inline int device_attribute(int attribute, int device) {
  switch (attribute) {
    case 1: case 2: case 3: return 1024;                  // threads per block; its x and y
    case 4: return 64;                                    // its z
    case 5: return 2147483647;                            // grid
    case 6: case 7: return 65535;
    case 8: return 49152;                                 // shared memory per block
    case 9: return 65536;                                 // constant memory
    case 10: return 32;                                   // warp
    case 12: case 82: return 65536;                       // registers
    case 14: return 512;                                  // texture alignment
    case 15: case 19: case 31: case 41: case 78: case 95: return 1;
    case 16: return 108;                                  // multiprocessors
    case 33: return device + 1;                           // PCI bus
    case 34: case 50: return 0;
    case 37: return 5120;                                 // memory bus
    case 38: return 40 << 20;                             // L2 cache
    case 39: return 2048;                                 // threads per multiprocessor
    case 40: return 3;                                    // copy engines
    case 75: return major;
    case 76: return minor;
    case 81: return 167936;                               // shared memory per multiprocessor
    case 97: return 166912;                               // of it for one block that asks
    case 99: return 1;                                    // host memory can be registered
    case 106: return 32;                                  // blocks per multiprocessor
    default: return 0;
  }
}

inline void pci_bus_id(char* text, int size, int device) {
  snprintf(text, (size_t)size, "0000:%02x:00.0", (unsigned)(device + 1) & 0xff);
}

inline void uuid(char* bytes, int device) {
  for (int i = 0; i < 16; i++) bytes[i] = (char)(i == 15 ? device + 1 : 0x10 + i);
}

}  // namespace fake_cuda
