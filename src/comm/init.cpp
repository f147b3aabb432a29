#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/cuda.h>

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "comm/environment.h"
#include "comm/group/group_impl.h"
#include "comm/host.h"
#include "comm/launcher_process.h"
#include "comm/rendezvous.h"
#include "libtorch/compat.h"

namespace tessera {
namespace {

using comm::Environment;
using comm::Milliseconds;
using comm::StoreEndpoint;
using comm::StorePtr;

constexpr Milliseconds kDefaultTimeout = std::chrono::minutes(10);
/// Thirty years, which can still be added to a time.
constexpr Milliseconds kLongestTimeout = std::chrono::seconds(1'000'000'000);
/// How long a process that cannot take part tries to tell the other ranks.
constexpr Milliseconds kRefusal{2000};

/// A store that this process hosts. Kept until the process ends: other ranks
/// may need the store after this rank has shut down, and a later init() uses it
/// again.
struct HostedStore {
  StoreEndpoint asked_for;
  StoreEndpoint endpoint; // with the port in use
  StorePtr store;
  std::unique_ptr<comm::PortHandout> handout; // where no port was given
};

struct State {
  Mutex mutex;
  Group world TESSERA_GUARDED_BY(mutex);
  int num_inits TESSERA_GUARDED_BY(mutex) = 0; // the same on all ranks
  std::vector<HostedStore> hosted TESSERA_GUARDED_BY(mutex);
};

State& state() {
  // Never destroyed: groups may be asked for in static destructors.
  static auto* instance = new State;
  return *instance;
}

Milliseconds timeout_from(const InitOptions& options) {
  if (options.timeout()) {
    if (options.timeout()->count() <= 0) {
      raise<c10::ValueError>(
          {.call = "init"}, "the timeout must be longer than zero.");
    }
    return std::min(*options.timeout(), kLongestTimeout);
  }
  const char* text = std::getenv("TESSERA_TIMEOUT");
  if (text == nullptr || *text == '\0') {
    return kDefaultTimeout;
  }
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0.001) || seconds > 1e9) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_TIMEOUT=\"{}\" is not a number of seconds, 0.001 or more. Correct or unset it.",
            text));
  }
  return Milliseconds(static_cast<int64_t>(seconds * 1000));
}

bool compare_calls_setting() {
  const char* text = std::getenv("TESSERA_CHECK");
  const std::string value = text == nullptr ? "" : text;
  if (!value.empty() && value != "0" && value != "1") {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format("TESSERA_CHECK=\"{}\" must be 0 or 1.", value));
  }
  return value == "1";
}

/// The backend of the options; "auto" leaves it to TESSERA_BACKEND.
std::string backend_from(const InitOptions& options) {
  constexpr std::array kNames{"auto", "shm", "gloo", "nccl", "fake"};
  const auto has = [](const auto& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (!has(kNames, options.backend())) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "there is no backend \"{}\"; choose auto, shm, gloo, nccl or fake.",
            options.backend()));
  }
  const char* text = std::getenv("TESSERA_BACKEND");
  if (options.backend() != "auto" || text == nullptr || *text == '\0') {
    return options.backend();
  }
  // Not "fake": a variable must not turn training into pretence.
  constexpr std::array kOfVariable{"auto", "shm", "gloo", "nccl"};
  if (!has(kOfVariable, text)) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_BACKEND=\"{}\" is not one of auto, shm, gloo and nccl. Correct or unset it.",
            text));
  }
  return text;
}

/// The environment, with the options in place of what they set.
Environment settle(const InitOptions& options) {
  Environment environment;
  // If the options give rank and size, the environment's are not read.
  if (options.rank() && options.world_size()) {
    environment.launcher = "InitOptions";
  } else {
    environment = comm::read_environment(std::getenv);
  }
  environment.rank = options.rank().value_or(environment.rank);
  environment.world_size =
      options.world_size().value_or(environment.world_size);
  environment.local_rank = options.local_rank().value_or(
      environment.launcher == "InitOptions" ? environment.rank
                                            : environment.local_rank);
  if (options.master_addr()) {
    environment.master_addr = options.master_addr();
  }
  if (options.master_port()) {
    environment.master_port = options.master_port();
  }
  environment.store_is_hosted =
      options.store_is_hosted().value_or(environment.store_is_hosted);
  if (environment.world_size < 1 || environment.rank < 0 ||
      environment.rank >= environment.world_size) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "rank {} of a world of {}: ranks count from 0 to world_size - 1.",
            environment.rank,
            environment.world_size));
  }
  return environment;
}

struct OpenedStore {
  StorePtr store;
  StoreEndpoint endpoint;
};

/// Hosts the store, or finds the store that an earlier init() hosts there.
OpenedStore host(
    std::vector<HostedStore>& kept,
    const StoreEndpoint& asked_for,
    const std::string& job_id,
    Milliseconds timeout) {
  for (const HostedStore& hosted : kept) {
    if (hosted.asked_for.to_string() == asked_for.to_string()) {
      StorePtr store =
          hosted.store->clone(); // the first connection may be lost
      store->setTimeout(timeout);
      return {std::move(store), hosted.endpoint};
    }
  }
  HostedStore hosted{asked_for, asked_for, nullptr, nullptr};
  hosted.store = comm::host_store(hosted.endpoint, timeout);
  if (!job_id.empty()) {
    hosted.handout =
        std::make_unique<comm::PortHandout>(job_id, hosted.endpoint.port);
  }
  OpenedStore opened{hosted.store, hosted.endpoint};
  kept.push_back(std::move(hosted));
  return opened;
}

OpenedStore open_store(
    std::vector<HostedStore>& kept,
    const Environment& environment,
    Milliseconds timeout) {
  const ErrorSite site{
      .call = "init",
      .rank = environment.rank,
      .world_size = environment.world_size};
  const bool hosts = environment.rank == 0 && !environment.store_is_hosted;
  if (environment.master_addr && environment.master_port) {
    const StoreEndpoint endpoint{
        *environment.master_addr, *environment.master_port};
    return hosts
        ? host(kept, endpoint, /*job_id=*/"", timeout)
        : OpenedStore{comm::connect_store(endpoint, timeout), endpoint};
  }
  if (environment.master_addr || environment.master_port) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} is set but {} is not. Set both.",
            environment.master_addr ? "MASTER_ADDR" : "MASTER_PORT",
            environment.master_addr ? "MASTER_PORT" : "MASTER_ADDR"));
  }
  const std::string job_id =
      environment.job_id.empty() && environment.launcher == "PMI"
      ? comm::pmi_launcher_identity()
      : environment.job_id;
  if (job_id.empty() || !environment.one_host) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "started by {}, which does not say where rank 0 can be reached{}. Set MASTER_ADDR and MASTER_PORT, the same on all processes, or start with `tessera run`.",
            environment.launcher,
            environment.one_host ? "" : " from other hosts"));
  }
  StoreEndpoint endpoint{"127.0.0.1", 0};
  if (hosts) {
    return host(kept, endpoint, job_id, timeout);
  }
  endpoint.port = comm::PortHandout::ask(job_id, timeout);
  return {comm::connect_store(endpoint, timeout), endpoint};
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

bool is_traced() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) {
      return std::atoi(line.c_str() + std::strlen("TracerPid:")) != 0;
    }
  }
  return false;
}

/// TESSERA_DEBUG_RANK: lets a person attach before anything happens.
void wait_for_debugger_if_asked(int rank, int world_size) {
  const char* text = std::getenv("TESSERA_DEBUG_RANK");
  if (text == nullptr || *text == '\0') {
    return;
  }
  char* end = nullptr;
  const long wanted = std::strtol(text, &end, 10);
  if (*end != '\0' || wanted < 0 || wanted >= world_size) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_DEBUG_RANK=\"{}\" is not a rank of this world, 0 to {}. Correct or unset it.",
            text,
            world_size - 1));
  }
  if (wanted != rank) {
    return;
  }
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); // a sibling of ours may attach
  const std::string line = fmt::format(
      "tessera: rank {} waits for a debugger: gdb -p {}\n", rank, getpid());
  std::fputs(line.c_str(), stderr);
  while (!is_traced()) {
    std::this_thread::sleep_for(Milliseconds(50));
  }
}

/// NCCL needs a device for each rank of a host.
bool each_rank_has_a_device(const std::vector<comm::Member>& members) {
  std::map<std::string, int> ranks_on;
  for (const auto& member : members) {
    ++ranks_on[member.host];
  }
  return std::all_of(members.begin(), members.end(), [&](const auto& member) {
    return member.cuda_devices >= ranks_on[member.host];
  });
}

bool decide_on_nccl(
    const std::string& backend,
    const Environment& environment,
    const std::vector<comm::Member>& members) {
  const bool possible =
      comm::nccl_is_built() && each_rank_has_a_device(members);
  if (backend == "nccl" && !possible) {
    raise<c10::ValueError>(
        {.call = "init",
         .rank = environment.rank,
         .world_size = environment.world_size},
        comm::nccl_is_built()
            ? "the backend \"nccl\" was asked for, but there are fewer CUDA devices than ranks on some host, and NCCL refuses to share one. Start fewer ranks, or use \"auto\"."
            : "the backend \"nccl\" was asked for, but this Tessera was built without it. Build against a LibTorch with CUDA where nccl.h can be found.");
  }
  return possible && (backend == "auto" || backend == "nccl");
}

std::vector<int> number_hosts(const std::vector<comm::Member>& members) {
  std::map<std::string, int> numbers;
  std::vector<int> host_of;
  for (const auto& member : members) {
    const int next = static_cast<int>(numbers.size());
    host_of.push_back(numbers.try_emplace(member.host, next).first->second);
  }
  return host_of;
}

/// Warns of ranks that are on one host for their user and cannot share memory.
void warn_if_apart(
    const std::string& backend,
    const std::vector<comm::Member>& members) {
  if (backend != "auto" && backend != "nccl") {
    return;
  }
  for (size_t rank = 1; rank < members.size(); ++rank) {
    const std::string what =
        comm::what_separates(members[0].host, members[rank].host);
    if (!what.empty()) {
      TORCH_WARN(
          "[init] ranks 0 and ",
          rank,
          " are on one host but in different ",
          what,
          ", so they do not share memory and use Gloo, which is slower. TESSERA_BACKEND=gloo chooses Gloo without this warning.");
      return;
    }
  }
}

/// The settings of this process, checked before it joins the world.
std::shared_ptr<comm::WorldInfo> read_settings(
    const InitOptions& options,
    const Environment& environment) {
  auto info = std::make_shared<comm::WorldInfo>();
  info->rank = environment.rank;
  info->local_rank = environment.local_rank;
  info->backend = backend_from(options);
  info->timeout = timeout_from(options);
  info->compare_calls = compare_calls_setting();
  info->host_of.assign(static_cast<size_t>(environment.world_size), 0);
  return info;
}

Group make_world(
    std::vector<HostedStore>& kept,
    const InitOptions& options,
    const Environment& environment,
    const std::shared_ptr<comm::WorldInfo>& info,
    int num_inits) {
  StorePtr store;
  if (environment.world_size > 1 && info->backend != "fake") {
    const OpenedStore opened = open_store(kept, environment, info->timeout);
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
             info->backend,
             info->compare_calls ? 1 : 0)},
        info->timeout);
    info->host_of = number_hosts(members);
    info->use_nccl = decide_on_nccl(info->backend, environment, members);
    if (environment.rank == 0) {
      warn_if_apart(info->backend, members);
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
    environment = settle(options);
    info = read_settings(options, environment);
    wait_for_debugger_if_asked(environment.rank, environment.world_size);
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
