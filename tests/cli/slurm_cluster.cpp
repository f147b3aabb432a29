#include "slurm_cluster.h"

#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "base/unique_fd.h"
#include "fetched_launchers.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kStartTimeout{120};
constexpr std::chrono::seconds kCommandTimeout{300};

std::string sbin(const std::string& name) {
  return (launchers_root() / "usr/sbin" / name).string();
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, sizeof(name) - 1);
  const std::string full = name;
  return full.substr(0, full.find('.'));
}

std::string user_name() {
  const passwd* user = ::getpwuid(::geteuid());
  return user != nullptr ? user->pw_name : std::to_string(::geteuid());
}

/// Ports that were free a moment ago.
std::vector<std::string> free_ports(int count) {
  std::vector<UniqueFd>
      sockets; // held until all are found, so that they differ
  std::vector<std::string> ports;
  for (int i = 0; i < count; ++i) {
    sockets.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t size = sizeof(address);
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    ::bind(sockets.back().get(), raw, size);
    ::getsockname(sockets.back().get(), raw, &size);
    ports.push_back(std::to_string(ntohs(address.sin_port)));
  }
  return ports;
}

std::string read_text(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void replace_all(
    std::string& text,
    const std::string& what,
    const std::string& by) {
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

} // namespace

SlurmCluster::SlurmCluster() {
  if (launchers_root().empty()) {
    problem_ = "no Slurm here: `make setup` could not fetch it";
    return;
  }
  char name[] = "/tmp/tessera_slurm_XXXXXX";
  if (::mkdtemp(name) == nullptr) {
    problem_ = "Slurm cannot be run here: no folder can be made below /tmp";
    return;
  }
  state_ = name;
  ::chmod(name, 0755); // jobs of other users read the configuration
  for (const char* folder : {"log", "state", "spool/n0", "spool/n1", "work"}) {
    fs::create_directories(state_ / folder);
  }
  ::chmod((state_ / "work").c_str(), 01777);
  write_configuration();

  start_daemon(
      "munged",
      {sbin("munged"),
       "--foreground",
       "--force",
       "--key-file=" + (state_ / "munge.key").string(),
       "--socket=" + (state_ / "munge.sock").string(),
       "--pid-file=" + (state_ / "munged.pid").string(),
       "--log-file=" + (state_ / "log/munge.log").string(),
       "--seed-file=" + (state_ / "munge.seed").string()});
  const auto deadline = Clock::now() + kStartTimeout;
  while (!fs::exists(state_ / "munge.sock") && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string configuration = (state_ / "slurm.conf").string();
  start_daemon("slurmctld", {sbin("slurmctld-wlm"), "-D", "-f", configuration});
  for (const char* node : {"n0", "n1"}) {
    start_daemon(
        node,
        {sbin("slurmd-wlm"),
         "-D",
         "-N",
         node,
         "-f",
         configuration,
         "-d",
         sbin("slurmstepd-wlm")});
  }
  while (!is_ready()) {
    if (Clock::now() >= deadline) {
      problem_ = "Slurm cannot be run here: " + logs();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

SlurmCluster::~SlurmCluster() {
  if (state_.empty()) {
    return;
  }
  if (problem_.empty()) {
    run({"scancel", "--signal=KILL", "--full", "--user", user_name()});
    run({"scontrol", "shutdown"}); // daemons that end by themselves are tidy
  }
  daemons_.clear();
  // Steps and what they run; killed again and again, since one may have forked.
  for (auto left = tree_.descendants(); !left.empty();
       left = tree_.descendants()) {
    for (const auto& process : left) {
      ::kill(process.pid, SIGKILL);
    }
    tree_.reap_orphans({});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::error_code ignored;
  fs::remove_all(state_, ignored);
}

void SlurmCluster::write_configuration() const {
  std::ofstream key(state_ / "munge.key", std::ios::binary);
  std::random_device random;
  for (int i = 0; i < 128; ++i) {
    key.put(static_cast<char>(random()));
  }
  key.close();
  ::chmod((state_ / "munge.key").c_str(), 0600);

  std::string text = read_text(TESSERA_SLURM_CONF);
  replace_all(text, "@HOST@", host_name());
  replace_all(text, "@USER@", user_name());
  replace_all(text, "@STATE@", state_.string());
  replace_all(
      text, "@PLUGINS@", (launchers_libraries() / "slurm-wlm").string());
  const auto ports = free_ports(3);
  for (size_t i = 0; i < ports.size(); ++i) {
    replace_all(text, "@PORT" + std::to_string(i) + "@", ports[i]);
  }
  std::ofstream(state_ / "slurm.conf") << text;
}

void SlurmCluster::start_daemon(
    const std::string& name,
    std::vector<std::string> words) {
  // Into a file: nobody reads a pipe while they run.
  words.insert(
      words.begin(),
      {"sh",
       "-c",
       "exec \"$@\" >\"$0\" 2>&1",
       (state_ / "log" / (name + ".log")).string()});
  daemons_.push_back(std::make_unique<Command>(words, options()));
}

bool SlurmCluster::is_ready() const {
  // "idle" alone: a trailing mark says that a node does not answer yet.
  const auto result = run({"sinfo", "-h", "-N", "-o", "%T"});
  return result.exit_code == 0 && result.output == "idle\nidle\n";
}

std::string SlurmCluster::logs() const {
  std::string text;
  for (const auto& entry : fs::directory_iterator(state_ / "log")) {
    const std::string log = read_text(entry.path());
    text += entry.path().filename().string() + ": " +
        log.substr(log.size() - std::min<size_t>(log.size(), 400)) + " ";
  }
  return text;
}

CommandOptions SlurmCluster::options() const {
  CommandOptions options{
      .environment = launchers_environment(), .timeout = kCommandTimeout};
  options.environment["SLURM_CONF"] = (state_ / "slurm.conf").string();
  return options;
}

std::unique_ptr<Command> SlurmCluster::start(
    std::vector<std::string> words,
    Submitter submitter) const {
  if (submitter == Submitter::Nobody) {
    words.insert(
        words.begin(),
        {"setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"});
  }
  words.insert(
      words.begin(), {"sh", "-c", "cd \"$0\" && exec \"$@\"", work().string()});
  return std::make_unique<Command>(words, options());
}

CommandResult SlurmCluster::run(
    std::vector<std::string> words,
    Submitter submitter) const {
  return start(std::move(words), submitter)->wait();
}

} // namespace tessera::testing
