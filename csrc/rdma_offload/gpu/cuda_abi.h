// What of the CUDA driver's binary interface is used: no header of CUDA is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptra::cuda {

using Result = int;
using Ordinal = int;  // of a device
using Address = unsigned long long;  // of a device's memory
struct ContextHandle;
struct StreamHandle;
struct EventHandle;
using Context = ContextHandle*;
using Stream = StreamHandle*;  // nullptr: the default one
using Event = EventHandle*;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kDeinitialized = 4;
constexpr Result kNotReady = 600;
constexpr Result kCaptureImplicit = 906;

constexpr unsigned kStreamNonBlocking = 1;  // it does not wait for the default stream, nor that for it
constexpr unsigned kEventTiming = 0;
constexpr unsigned kEventNoTiming = 2;
constexpr unsigned kHostPortable = 1;
constexpr int kCaptureNone = 0;
constexpr int kCaptureRelaxed = 2;

constexpr int kOldest = 11040;  // of drivers: CUDA 11.4

}  // namespace adaptra::cuda
