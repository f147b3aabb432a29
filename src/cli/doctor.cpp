#include <tessera/error.h>
#include <tessera/version.h>

#include <ATen/Version.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <dlfcn.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <future>
#include <iostream>
#include <optional>

#include "cli/commands.h"
#include "comm/backends.h"
#include "comm/host.h"
#include "comm/peer_owner.h"

namespace tessera::cli {
namespace {

using comm::BackendConfig;
using comm::BackendPtr;
using comm::Milliseconds;
using comm::StorePtr;

constexpr Milliseconds kPatience{5000};

void print_fact(const std::string& name, const std::string& value) {
  std::cout << fmt::format("  {:<14}{}\n", name, value);
}

/// One thing that is tried out. Nothing: it works.
struct Check {
  std::string name;
  std::function<void()> try_it;
  std::string fix;
};

/// Two ranks as threads of this process, talking through `make`.
void all_reduce_between_two(BackendPtr (*make)(const BackendConfig&)) {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  auto one_rank = [&](int rank) {
    BackendPtr backend = make(
        {.store = store,
         .rank = rank,
         .global_ranks = {0, 1},
         .timeout = kPatience,
         .address = "127.0.0.1",
         .ranks_on_host = 2});
    std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
    backend->allreduce(tensors)->wait();
    return tensors[0].sum().item<double>();
  };
  auto other = std::async(std::launch::async, one_rank, 1);
  const double sum = one_rank(0);
  if (sum != 12 || other.get() != 12) {
    throw std::runtime_error("an all-reduce gave a wrong sum");
  }
}

void meet_on_loopback() {
  comm::StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = comm::host_store(endpoint, kPatience);
  StorePtr client = comm::connect_store(endpoint, kPatience);
  client->set("doctor", "here");
  if (server->get_to_str("doctor") != "here") {
    throw std::runtime_error("the store lost a value");
  }
}

std::string torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::show_config), &info) == 0) {
    return "?";
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/'));
}

std::string describe_devices() {
  const auto count = torch::cuda::device_count();
  if (count > 0) {
    return fmt::format("{} CUDA device(s)", count);
  }
  return "no CUDA device (CPU training works)";
}

int report() {
  std::cout << "tessera " << version() << "\n";
  print_fact(
      "LibTorch", fmt::format("{} in {}", libtorch_version(), torch_folder()));
  print_fact("cores", std::to_string(comm::available_cores()));
  print_fact("devices", describe_devices());
  print_fact(
      "NCCL",
      comm::nccl_is_built()
          ? "built in"
          : "not built in (needs a LibTorch with CUDA, and nccl.h, when Tessera is built)");
  print_fact("neighbours", comm::describe_owner_check());

  const Check checks[] = {
      {"rendezvous",
       meet_on_loopback,
       "Ranks meet through TCP on 127.0.0.1. Bring the interface up (`ip link set lo up`) and allow connections to it."},
      {"gloo",
       [] { all_reduce_between_two(comm::make_gloo_backend); },
       "Gloo connects ranks over TCP. Allow connections between local ports; across hosts set TESSERA_SOCKET_ADDR to the right interface's address."},
      {"shm",
       [] { all_reduce_between_two(comm::make_shm_backend); },
       "Ranks of one host share memory through memfd and /proc/PID/fd. Mount this process namespace's own /proc and allow memfd_create, or set TESSERA_BACKEND=gloo. Ranks that cannot share memory use Gloo, which is slower, with a warning."},
  };
  int failures = 0;
  for (const Check& check : checks) {
    try {
      check.try_it();
      print_fact(check.name, "ok");
    } catch (const std::exception& error) {
      ++failures;
      print_fact(check.name, fmt::format("FAILS: {}", error.what()));
      print_fact("", "fix: " + check.fix);
    }
  }
  std::cout
      << (failures == 0
              ? "All is well. Next: tessera run -n 2 PROGRAM\n"
              : fmt::format(
                    "{} of {} checks failed.\n", failures, std::size(checks)));
  return failures == 0 ? 0 : 1;
}

} // namespace

Action add_doctor(CLI::App& app) {
  app.add_subcommand(
      "doctor", "Check the installation and say how to mend what is wrong");
  return report;
}

} // namespace tessera::cli
