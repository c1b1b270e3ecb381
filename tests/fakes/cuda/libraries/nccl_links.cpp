#include "nccl_links.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <sys/stat.h>
#include <utility>

#include "options.hpp"

namespace fake_cuda {
namespace {

struct Link {
  double seconds = 0, bytes_per_second = 0, busy_until = 0;
};

constexpr double look_again = 0.05;  // seconds

std::mutex mutex;
std::map<std::pair<int, int>, Link> links;
double looked = -1;
long long changed = -1;

void read_again() {
  if (now() - looked < look_again) return;
  looked = now();
  struct stat found {};
  if (stat(options().links.c_str(), &found) != 0) return;
  const long long stamp = found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec + (long long)found.st_ino;
  if (stamp == changed) return;
  FILE* file = fopen(options().links.c_str(), "r");
  if (!file) return;
  changed = stamp;
  for (auto& item : links) item.second.seconds = item.second.bytes_per_second = 0;
  char line[256];
  for (int number = 1; fgets(line, sizeof line, file); number++) {
    int a = 0, b = 0;
    char direction = 0;
    double milliseconds = 0, megabytes = 0;
    const int fields = sscanf(line, " %d %c %d %lf %lf", &a, &direction, &b, &milliseconds, &megabytes);
    if (fields <= 0 || line[0] == '#') continue;
    if (fields < 4 || (direction != '>' && direction != '-')) {
      say("%s, line %d: '%s' has to be like '2>3 40' or '2-3 40 1000' (ms, MB/s); ignored", options().links.c_str(), number, line);
      continue;
    }
    for (auto way : {std::make_pair(a, b), std::make_pair(b, a)}) {
      links[way].seconds = milliseconds * 1e-3;
      links[way].bytes_per_second = megabytes * 1e6;
      if (direction == '>') break;
    }
  }
  fclose(file);
  if (options().verbose) say("read %s", options().links.c_str());
}

}  // namespace

double arrival(int from, int to, double sent, size_t bytes) {
  if (options().links.empty()) return sent;
  std::lock_guard<std::mutex> lock(mutex);
  read_again();
  auto found = links.find({from, to});
  if (found == links.end()) return sent;
  Link& link = found->second;
  if (link.bytes_per_second <= 0) return sent + link.seconds;
  link.busy_until = std::max(link.busy_until, sent) + options().payload * (double)bytes / link.bytes_per_second;
  return link.busy_until + link.seconds;
}

}  // namespace fake_cuda
