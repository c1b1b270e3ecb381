// Waits for events of a GPU have names, and a test takes one after the other away: each has to be
// missed (tests/hostile_cuda). In what is installed `removed` is nothing at all.
#pragma once

namespace adaptra {

#ifdef TEST_REMOVED_WAITS
bool removed(const char* wait);  // the test's
#else
constexpr bool removed(const char*) { return false; }
#endif

}  // namespace adaptra
