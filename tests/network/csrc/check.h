// What the native tests share: a check that says which seed failed, and a limit on every wait.
#pragma once

#include <cstdio>
#include <cstdlib>

inline unsigned long g_seed;

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      std::fprintf(stderr, "seed %lu: %s:%d: %s\n", g_seed, __FILE__, __LINE__, #condition);   \
      std::abort();                                                                            \
    }                                                                                          \
  } while (0)

constexpr double kPatience = 120;  // seconds; against hanging, nothing is measured with it
