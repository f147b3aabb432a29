#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/cuda.h>

#include <signal.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/mutex.h"
#include "comm/debugger.h"
#include "comm/environment.h"
#include "comm/group/group_impl.h"
#include "comm/host.h"
#include "comm/members.h"
#include "comm/rendezvous.h"
#include "comm/settings.h"
#include "comm/store_of_world.h"
#include "libtorch/compat.h"

namespace tessera {
namespace {

using comm::Environment;
using comm::Milliseconds;
using comm::StoreEndpoint;
using comm::StorePtr;

/// How long a process that cannot take part tries to tell the other ranks.
constexpr Milliseconds kRefusal{2000};

struct State {
  Mutex mutex;
  Group world TESSERA_GUARDED_BY(mutex);
  int num_inits TESSERA_GUARDED_BY(mutex) = 0; // the same on all ranks
  std::vector<comm::HostedStore> hosted TESSERA_GUARDED_BY(mutex);
};

State& state() {
  // Never destroyed: groups may be asked for in static destructors.
  static auto* instance = new State;
  return *instance;
}

std::string world_prefix(
    const InitOptions& options,
    int restart_count,
    int num_inits) {
  const std::string own = options.store_prefix().empty()
      ? fmt::format("init{}", num_inits)
      : options.store_prefix();
  return fmt::format("tessera/attempt{}/{}", restart_count, own);
}

/// The other ranks wait for this rank: tells them why it will not come. Best
/// effort, since the connection to them may be what is wrong.
void tell_others(const InitOptions& options, int num_inits, const char* what) {
  try {
    const char* address = std::getenv("MASTER_ADDR");
    const char* port = std::getenv("MASTER_PORT");
    const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
    const StoreEndpoint endpoint{
        options.master_addr().value_or(address == nullptr ? "" : address),
        options.master_port().value_or(port == nullptr ? 0 : std::atoi(port))};
    if (endpoint.address.empty() || endpoint.port <= 0) {
      return;
    }
    auto store = comm::connect_store(endpoint, kRefusal);
    c10d::PrefixStore own(
        world_prefix(
            options, restarts == nullptr ? 0 : std::atoi(restarts), num_inits),
        store);
    comm::refuse(
        own, fmt::format("another process could not take part: {}", what));
  } catch (const std::exception&) {
    // The error of this rank is the one to report; the others have a timeout.
  }
}

void ignore_sigpipe() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 &&
      current.sa_handler == SIG_DFL) {
    signal(SIGPIPE, SIG_IGN);
  }
}

Group make_world(
    std::vector<comm::HostedStore>& kept,
    const InitOptions& options,
    const Environment& environment,
    const std::shared_ptr<comm::WorldInfo>& info,
    int num_inits) {
  StorePtr store;
  if (environment.world_size > 1 &&
      info->backend != comm::BackendChoice::Fake) {
    const comm::OpenedStore opened =
        comm::open_store(kept, environment, info->timeout);
    store = c10::make_intrusive<c10d::PrefixStore>(
        world_prefix(options, environment.restart_count, num_inits),
        opened.store);
    info->address = comm::address_towards(
        opened.endpoint.address,
        opened.endpoint.port,
        std::chrono::steady_clock::now() + info->timeout);
    const auto members = comm::join(
        *store,
        environment.rank == 0 && !environment.store_is_hosted,
        environment.rank,
        {.host = comm::host_identity(),
         .world_size = environment.world_size,
         .cuda_devices = static_cast<int>(torch::cuda::device_count()),
         .torch_version = kTorchVersion,
         .settings = fmt::format(
             "backend={},TESSERA_CHECK={}",
             comm::name_of(info->backend),
             info->compare_calls ? 1 : 0)},
        info->timeout);
    info->host_of = comm::number_hosts(members);
    info->use_nccl = comm::decide_on_nccl(info->backend, environment, members);
    if (environment.rank == 0) {
      comm::warn_if_apart(info->backend, members);
    }
    ignore_sigpipe();
  }
  std::vector<int> everyone(static_cast<size_t>(environment.world_size));
  std::iota(everyone.begin(), everyone.end(), 0);
  return Group(
      std::make_shared<Group::Impl>(info, store, "world", std::move(everyone)));
}

/// A process that ends leaves its groups, so that peers are told that the rank
/// left and not that it died. Its forked children tell nothing: they share the
/// memory, but they are not ranks.
void leave_at_exit() {
  static pid_t rank_process = 0;
  static std::once_flag once;
  std::call_once(once, [] {
    rank_process = getpid();
    std::atexit([] {
      if (getpid() == rank_process) {
        shutdown();
      }
    });
  });
}

} // namespace

Group init(const InitOptions& options) {
  State& current = state();
  const MutexLock lock(current.mutex);
  if (current.world.valid()) {
    raise(
        {.call = "init",
         .rank = current.world.rank(),
         .world_size = current.world.size()},
        "already initialized. Use tessera::world(), or call tessera::shutdown() first.");
  }
  const int num_inits = current.num_inits++;
  Environment environment;
  std::shared_ptr<comm::WorldInfo> info;
  try {
    environment = comm::settle_environment(options);
    info = comm::read_settings(options, environment);
    comm::wait_for_debugger_if_asked(environment.rank, environment.world_size);
  } catch (const c10::Error& error) {
    tell_others(options, num_inits, error.what());
    throw;
  }
  current.world =
      make_world(current.hosted, options, environment, info, num_inits);
  leave_at_exit();
  return current.world;
}

Group world() {
  State& current = state();
  const MutexLock lock(current.mutex);
  if (!current.world.valid()) {
    raise({.call = "world"}, "not initialized. Call tessera::init() first.");
  }
  return current.world;
}

bool is_initialized() {
  State& current = state();
  const MutexLock lock(current.mutex);
  return current.world.valid();
}

void shutdown() {
  State& current = state();
  const MutexLock lock(current.mutex);
  current.world = Group();
}

int local_rank() {
  return world().impl().world().local_rank;
}

} // namespace tessera
