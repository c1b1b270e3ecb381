#include "accounts.hpp"

#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "options.hpp"

namespace fake_cuda {
namespace {

constexpr size_t heading = 1024;  // the names, one a line, so that readers need no list of their own
constexpr int how_many = (int)Count::how_many;
const char* const names =
    "device_bytes\ndevice_peak\npinned_bytes\npinned_peak\n"
    "calls\nnccl_calls\nlaunches\nkernels\nhost_wait_us\nstalls\nstreams_made\nevents\nmarks\n";

using Counter = std::atomic<int64_t>;
Counter here[how_many];

Counter* open_counters() {
  const char* rank = getenv("RANK");
  if (options().accounts.empty() || !rank) return here;
  const std::string path = options().accounts + "/rank-" + rank + ".accounts";
  const size_t size = heading + sizeof(Counter) * how_many;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, (off_t)size) != 0) {
    say("FAKE_CUDA_ACCOUNTS: cannot write %s", path.c_str());
    abort();
  }
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) abort();
  memset(at, 0, size);
  strcpy((char*)at, names);
  return (Counter*)((char*)at + heading);
}

Counter* counters() {
  static PerProcess<Counter> found(open_counters);
  return found.get();
}

}  // namespace

void account(Count what, int64_t more) { counters()[(int)what] += more; }
int64_t accounted(Count what) { return counters()[(int)what]; }

void account_peak(Count what, Count peak, int64_t more) {
  const int64_t value = counters()[(int)what] += more;
  Counter& most = counters()[(int)peak];
  int64_t old = most;
  while (old < value && !most.compare_exchange_weak(old, value)) continue;
}

}  // namespace fake_cuda
