// Of CUDA's runtime headers (version 13), what the fake answers to.
#pragma once
#include <cstddef>

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2,
                      cudaErrorInvalidConfiguration = 9, cudaErrorInvalidDevice = 101,
                      cudaErrorInvalidResourceHandle = 400, cudaErrorSymbolNotFound = 500,
                      cudaErrorNotReady = 600, cudaErrorHostMemoryAlreadyRegistered = 712,
                      cudaErrorHostMemoryNotRegistered = 713, cudaErrorNotSupported = 801;

struct dim3 {
  unsigned x, y, z;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  void* stream;
  void* attrs;
  unsigned numAttrs;
};

struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int rest[23];
};

struct cudaPointerAttributes {
  int type, device;
  void *devicePointer, *hostPointer;
  long reserved[8];
};
constexpr int cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2;

struct cudaDeviceProp {
  char name[256], uuid[16], luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  int multiProcessorCount, integrated, canMapHostMemory;
  int textures[25], surfaces[14];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount;
  int unifiedAddressing, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize;
  int maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported;
  int localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID;
  int hostNativeAtomicSupported, pageableMemoryAccess, concurrentManagedAccess;
  int computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch;
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost;
  int maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, rest[75];
};

// As in CUDA 13's driver_types.h: callers allocate these.
static_assert(sizeof(cudaDeviceProp) == 1008 && offsetof(cudaDeviceProp, hostRegisterSupported) == 704);
static_assert(sizeof(cudaFuncAttributes) == 144 && sizeof(cudaPointerAttributes) == 64 + 24);
