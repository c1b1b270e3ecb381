#pragma once
#include <string>

#include "nccl_communicator.hpp"

namespace fake_cuda {

ncclResult_t failed(ncclResult_t, const std::string& why);  // says why, now and by ncclGetLastError

}  // namespace fake_cuda
