// The engine for Python: memory by address and length; no wait holds the GIL.
#include "bindings/work_bindings.h"
#include "engine.h"

using namespace adaptra;

namespace {

const uint8_t* address(uintptr_t at) { return reinterpret_cast<const uint8_t*>(at); }

struct Block {  // memory of the engine, which sends it without a copy
  std::shared_ptr<uint8_t> memory;
  uint64_t bytes;
};

VerbsChoice choice(int family, int version, std::string network, int bits) {
  if ((!network.empty() && network.size() != sizeof(ibv::Gid)) || bits < 0 || bits > 128) {
    throw std::invalid_argument("a network of " + std::to_string(network.size()) + " bytes and " +
                                std::to_string(bits) + " bits");
  }
  return {family, version, std::move(network), bits};
}

}  // namespace

void bind_engine(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<Block>(m, "Block", py::buffer_protocol())
      .def_property_readonly(
          "address", [](Block& block) { return reinterpret_cast<uintptr_t>(block.memory.get()); })
      .def_buffer([](Block& block) {
        return py::buffer_info(block.memory.get(), block.bytes);
      });

  py::class_<Peer::Counts>(m, "Counts")
      .def_readonly("paths", &Peer::Counts::paths)
      .def_readonly("trials", &Peer::Counts::trials)
      .def_readonly("sent", &Peer::Counts::sent)
      .def_readonly("received", &Peer::Counts::received)
      .def_readonly("bytes_sent", &Peer::Counts::bytes_sent)
      .def_readonly("bytes_received", &Peer::Counts::bytes_received)
      .def_readonly("again", &Peer::Counts::again)
      .def_readonly("twice", &Peer::Counts::twice)
      .def_readonly("kept", &Peer::Counts::kept);

  py::class_<VerbsPath, std::shared_ptr<VerbsPath>>(m, "VerbsPath")
      .def("card", [](const VerbsPath& path) { return py::bytes(path.card()); })
      .def("connect", &VerbsPath::connect, NoGil());

  py::class_<Engine, std::unique_ptr<Engine, Engine::End>>(m, "Engine")
      .def(py::init([](uint64_t window, uint64_t piece, uint64_t arena, double beat, double silence) {
             Limits limits;
             limits.window = window;
             limits.piece = piece;
             limits.arena = arena;
             limits.beat = beat;
             limits.silence = silence;
             return std::unique_ptr<Engine, Engine::End>(new Engine(limits));
           }),
           py::kw_only(), py::arg("window") = Limits().window, py::arg("piece") = Limits().piece,
           py::arg("arena") = Limits().arena, py::arg("beat") = Limits().beat,
           py::arg("silence") = Limits().silence)
      .def("add_peer", &Engine::add_peer)
      .def("add_tcp",
           [](Engine& engine, int rank, int fd, int order) {
             return engine.add_tcp(rank, Owned(fd), order);
           },
           NoGil())
      .def("add_tls",
           [](Engine& engine, int rank, int fd, int order, const std::string& key, bool first,
              double seconds) {
             Owned owned(fd);
             auto tls = std::make_unique<Tls>(fd, key, first, seconds);
             return engine.add_tcp(rank, std::move(owned), order, std::move(tls));
           },
           NoGil())
      .def("add_shm",
           [](Engine& engine, int rank, int socket, int ring, int arena, bool first) {
             return engine.add_shm(rank, {Owned(socket), Owned(ring), Owned(arena)}, first);
           },
           NoGil())
      .def("open_verbs",
           [](Engine& engine, int rank, const std::string& device, int port, int gid, int family,
              int version, const py::bytes& network, int bits, uint8_t traffic_class, uint8_t level,
              uint16_t partition, uint8_t timeout, uint8_t retries, uint32_t connections) {
             const VerbsChoice which = choice(family, version, network, bits);
             py::gil_scoped_release release;
             return engine.open_verbs(rank, device, port, gid, which,
                                      {traffic_class, level, partition, timeout, retries, connections});
           })
      .def("add_verbs",
           [](Engine& engine, int rank, const std::shared_ptr<VerbsPath>& path, int socket,
              int order) { return engine.add_verbs(rank, path, Owned(socket), order); },
           NoGil())
      .def("fail_peer", &Engine::fail_peer, NoGil())
      .def("wake", &Engine::wake, NoGil())
      .def("events",
           [](Engine& engine, double seconds) {
             std::vector<Engine::Event> found;
             {
               py::gil_scoped_release release;
               found = engine.events(seconds);
             }
             py::list events;
             for (auto& e : found) events.append(py::make_tuple(e.rank, e.path, e.what));
             return events;
           })
      .def("send",
           [](Engine& engine, int rank, Tag tag, uintptr_t at, uint64_t bytes, double sent) {
             return engine.send(rank, tag, address(at), bytes,
                                static_cast<Nanoseconds>(sent / kNano));
           },
           py::arg("rank"), py::arg("tag"), py::arg("at"), py::arg("bytes"), py::arg("sent") = 0.0,
           NoGil())
      .def("receive",
           [](Engine& engine, int rank, Tag tag, uintptr_t at, uint64_t bytes, bool exact) {
             return engine.receive(rank, tag, const_cast<uint8_t*>(address(at)), bytes, exact);
           },
           py::arg("rank"), py::arg("tag"), py::arg("at"), py::arg("bytes"), py::arg("exact") = true,
           NoGil())
      .def("abort", &Engine::abort, NoGil())
      .def("take", [](Engine& engine, uint64_t bytes) { return Block{engine.take(bytes), bytes}; })
      .def("prefer_node", &Engine::prefer_node)
      .def("arena_fd", &Engine::arena_fd)
      .def("counts", &Engine::counts)
      .def("close", &Engine::close, NoGil());
  m.def("new_ring", &ShmPath::new_ring);
  m.def("verbs_missing", &verbs_missing);
  m.def("verbs_ports", [](int family, int version, const py::bytes& network, int bits) {
    py::list ports;
    for (auto& p : verbs_ports(choice(family, version, network, bits))) {
      ports.append(py::make_tuple(p.device, p.port, p.active, p.link, p.gid_index, py::bytes(p.gid), p.why));
    }
    return ports;
  });
  m.def("no_tls", &Tls::missing);
}
