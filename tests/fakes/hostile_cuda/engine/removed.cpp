// Which wait of the engine a test has taken away.
#include "gpu/wait_site.h"

#include <atomic>
#include <cstring>

namespace {
char g_name[200];
std::atomic<uint64_t> g_times{0};
}  // namespace

bool adaptra::removed(const char* wait) {
  if (strcmp(wait, g_name) != 0) return false;
  ++g_times;
  return true;
}

// Between jobs: nobody waits then. An empty name: none.
extern "C" __attribute__((visibility("default"))) void test_remove_wait(const char* wait) {
  strncpy(g_name, wait, sizeof g_name - 1);
  g_times = 0;
}

// How often it would have been waited.
extern "C" __attribute__((visibility("default"))) uint64_t test_removed_times() { return g_times; }
