#include "verbs/verbs_dl.h"

#include <dlfcn.h>

#include <type_traits>

namespace adaptra {

namespace {

struct Opened {
  VerbsLibrary library{};
  std::string missing;

  Opened() {
    void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      missing = dlerror();
      return;
    }
    auto find = [&](auto& function, const char* name) {
      // In version 1.0 most of them had other arguments; two have never changed.
      void* found = dlvsym(handle, name, "IBVERBS_1.1");
      if (found == nullptr) found = dlvsym(handle, name, "IBVERBS_1.0");
      if (found == nullptr && missing.empty()) missing = dlerror();
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    };
    find(library.get_device_list, "ibv_get_device_list");
    find(library.free_device_list, "ibv_free_device_list");
    find(library.open_device, "ibv_open_device");
    find(library.close_device, "ibv_close_device");
    find(library.query_port, "ibv_query_port");
    find(library.query_gid, "ibv_query_gid");
    find(library.alloc_pd, "ibv_alloc_pd");
    find(library.dealloc_pd, "ibv_dealloc_pd");
    find(library.reg_mr, "ibv_reg_mr");
    find(library.dereg_mr, "ibv_dereg_mr");
    find(library.create_channel, "ibv_create_comp_channel");
    find(library.destroy_channel, "ibv_destroy_comp_channel");
    find(library.create_cq, "ibv_create_cq");
    find(library.destroy_cq, "ibv_destroy_cq");
    find(library.get_cq_event, "ibv_get_cq_event");
    find(library.ack_cq_events, "ibv_ack_cq_events");
    find(library.create_qp, "ibv_create_qp");
    find(library.modify_qp, "ibv_modify_qp");
    find(library.destroy_qp, "ibv_destroy_qp");
    find(library.get_async_event, "ibv_get_async_event");
    find(library.ack_async_event, "ibv_ack_async_event");
    find(library.status_text, "ibv_wc_status_str");
    library.query_gid_entry = reinterpret_cast<decltype(library.query_gid_entry)>(
        dlvsym(handle, "_ibv_query_gid_ex", "IBVERBS_1.11"));
    int (*fork_init)() = nullptr;
    find(fork_init, "ibv_fork_init");
    // Kernels before 5.12 would give a forked child the pages that a device writes to.
    if (missing.empty()) fork_init();
  }
};

const Opened& opened() {
  static const Opened once;
  return once;
}

}  // namespace

const VerbsLibrary* verbs_library() {
  return opened().missing.empty() ? &opened().library : nullptr;
}

std::string verbs_missing() { return opened().missing; }

}  // namespace adaptra
