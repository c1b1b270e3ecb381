// Random choices, the same for each seed.
#pragma once

#include <cstdint>
#include <random>

using Random = std::mt19937_64;
inline uint64_t below(Random& random, uint64_t most) { return random() % most; }
inline bool chance(Random& random, int percent) { return below(random, 100) < uint64_t(percent); }
