#include "clock.hpp"

#include <vector>

#include "device.hpp"
#include "options.hpp"

namespace fake_cuda {
namespace {

struct Piece {
  double since, shows;  // of the host's clock, of the devices'
  double rate;          // seconds of the devices' per second of the host's
};

std::mutex mutex;

std::vector<Piece>& pieces() {
  static PerProcess<std::vector<Piece>> made(
      [] { return new std::vector<Piece>{{0, 0, 1 + options().clock_ppm * 1e-6}}; });
  return *made.get();
}

double shown(const Piece& piece, double host) { return piece.shows + (host - piece.since) * piece.rate; }

}  // namespace

double device_time(double host) {
  Lock lock(mutex);
  auto& all = pieces();
  auto piece = all.size() - 1;
  while (piece > 0 && all[piece].since > host) piece--;
  return shown(all[piece], host);
}

}  // namespace fake_cuda

// From now on the devices' clock is so many millionths faster than the host's: as where NTP slews the host's.
extern "C" void fakeClockSlew(double ppm) {
  using namespace fake_cuda;
  Lock lock(mutex);
  const double at = now();
  pieces().push_back({at, shown(pieces().back(), at), 1 + ppm * 1e-6});
}
