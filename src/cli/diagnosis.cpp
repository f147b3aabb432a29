#include "cli/diagnosis.h"

#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/version.h>

#include <ATen/Version.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/cuda.h>

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>

#include "base/cores.h"
#include "comm/backends/backends.h"
#include "comm/environment.h"
#include "comm/store/peer_owner.h"
#include "launch/failure_report.h"
#include "launch/process.h"
#include "launch/rank_environment.h"

namespace tessera::cli {
namespace {

using comm::BackendConfig;
using comm::CarrierPtr;
using comm::Milliseconds;
using comm::StorePtr;

constexpr Milliseconds kPatience{5000};
/// For two processes that load LibTorch, on a busy host.
constexpr Milliseconds kLaunchPatience{120000};

/// One thing that is tried out. Throws if it does not work, else returns what
/// there is to say of it, if anything.
struct Check {
  std::string name;
  std::function<std::string()> try_it;
  std::string fix;
};

/// Two ranks as threads of this process, talking through `make`.
void all_reduce_between_two(CarrierPtr (*make)(const BackendConfig&)) {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  auto one_rank = [&](int rank) {
    const CarrierPtr carrier = make(
        {.store = store,
         .rank = rank,
         .global_ranks = {0, 1},
         .timeout = kPatience,
         .address = "127.0.0.1",
         .ranks_on_host = 2});
    std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
    carrier->backend()->allreduce(tensors)->wait();
    return tensors[0].sum().item<double>();
  };
  auto other = std::async(std::launch::async, one_rank, 1);
  const double sum = one_rank(0);
  if (sum != 12 || other.get() != 12) {
    throw std::runtime_error("an all-reduce gave a wrong sum");
  }
}

std::string meet_on_loopback() {
  comm::StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = comm::host_store(endpoint, kPatience);
  StorePtr client = comm::connect_store(endpoint, kPatience);
  client->set("doctor", "here");
  if (server->get_to_str("doctor") != "here") {
    throw std::runtime_error("the store lost a value");
  }
  return "ranks can meet over TCP";
}

std::string read_all(std::FILE* file) {
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
    text.push_back(static_cast<char>(c));
  }
  return text;
}

/// What a user does next: `tessera run` with a program that calls init(), in
/// the environment that this process has.
std::string run_two_ranks() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> output(
      std::tmpfile(), std::fclose);
  if (!output) {
    throw std::runtime_error("no file could be made for the ranks' output");
  }
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").string();
  launch::SpawnRequest request{
      .argv = {program, "run", "-n", "2", program, "doctor", kAsRank},
      .environment = launch::current_environment(),
      .stdout_fd = fileno(output.get()),
      .stderr_fd = fileno(output.get())};
  sigemptyset(&request.signal_mask);
  launch::Process launcher = launch::Process::spawn(request);
  pollfd ended{launcher.pidfd(), POLLIN, 0};
  if (poll(&ended, 1, static_cast<int>(kLaunchPatience.count())) != 1) {
    launcher.signal_group(SIGKILL);
    throw std::runtime_error("two ranks did not end in time");
  }
  const auto status = launcher.poll_exit();
  launcher.reap();
  if (!status || !status->ok()) {
    throw std::runtime_error(fmt::format(
        "`tessera run -n 2` ended with {}:\n{}",
        status ? launch::status_text(*status) : "an unknown status",
        read_all(output.get())));
  }
  return "tessera run starts ranks that meet";
}

/// What tessera::init() makes of this process's environment.
std::string describe_place() {
  const comm::Environment place = comm::read_environment(std::getenv);
  if (place.launcher == "none") {
    return "a program is alone here, unless a launcher starts it";
  }
  return fmt::format(
      "a program is rank {} of {} here, by the variables of {}",
      place.rank,
      place.world_size,
      place.launcher);
}

std::string torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::show_config), &info) == 0) {
    return "?";
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/'));
}

} // namespace

Installation find_installation() {
  return {
      .version = version(),
      .libtorch_version = libtorch_version(),
      .libtorch_folder = torch_folder(),
      .cores = host_cores(),
      .cuda_devices = static_cast<int64_t>(torch::cuda::device_count()),
      .has_nccl = comm::nccl_is_built(),
      .neighbours = comm::describe_owner_check()};
}

std::vector<CheckResult> try_out_everything(
    const std::function<void(const CheckResult&)>& tell) {
  const Check checks[] = {
      {"environment",
       describe_place,
       "A launcher around this shell set variables that contradict each other. Correct or unset them; docs/environment.md lists them."},
      {"rendezvous",
       meet_on_loopback,
       "Ranks meet through TCP on 127.0.0.1. Bring the interface up (`ip link set lo up`) and allow connections to it."},
      {"gloo",
       [] {
         all_reduce_between_two(comm::make_gloo_backend);
         return std::string("ranks can exchange tensors over TCP");
       },
       "Gloo connects ranks over TCP. Allow connections between local ports; across hosts set TESSERA_SOCKET_ADDR to the right interface's address."},
      {"shm",
       [] {
         all_reduce_between_two(comm::make_shm_backend);
         return std::string(
             "ranks of this host can exchange tensors through shared memory");
       },
       "Ranks of one host share memory through memfd and /proc/PID/fd. Mount this process namespace's own /proc and allow memfd_create, or set TESSERA_BACKEND=gloo. Ranks that cannot share memory use Gloo, which is slower, with a warning."},
      {"launch",
       run_two_ranks,
       "`tessera run` starts ranks that meet in tessera::init(). What it printed above says what stopped them."},
  };
  std::vector<CheckResult> results;
  for (const Check& check : checks) {
    CheckResult result{.name = check.name, .fix = check.fix};
    try {
      result.text = check.try_it();
      result.works = true;
    } catch (const std::exception& error) {
      result.text = error.what();
    }
    tell(result);
    results.push_back(std::move(result));
  }
  return results;
}

int be_a_rank_of_the_diagnosis() {
  const Group world = init();
  const at::Tensor sum = at::full({4}, world.rank() + 1.0);
  world.all_reduce(sum);
  const double expected = world.size() * (world.size() + 1) / 2.0;
  return world.size() == 2 && (sum == expected).all().item<bool>() ? 0 : 1;
}

} // namespace tessera::cli
