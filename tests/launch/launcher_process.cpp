#include "launcher_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLauncherTimeout{240};
constexpr std::chrono::seconds kEventTimeout{120};
constexpr std::chrono::milliseconds kEventInterval{5};

// Returns false at the end of the file.
bool read_available(int fd, std::string* text) {
  char buffer[65536];
  const ssize_t num_bytes = ::read(fd, buffer, sizeof(buffer));
  if (num_bytes > 0) {
    text->append(buffer, static_cast<size_t>(num_bytes));
  }
  return num_bytes > 0;
}

} // namespace

TempDir::TempDir() {
  std::string name =
      (std::filesystem::temp_directory_path() / "tessera_launch_XXXXXX")
          .string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw std::runtime_error("cannot make a temporary folder: " + name);
  }
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

FileChannel::FileChannel(std::filesystem::path folder)
    : folder_(std::move(folder)) {
  std::filesystem::create_directories(folder_);
}

std::filesystem::path FileChannel::path_of(const std::string& key) const {
  if (std::filesystem::exists(folder_ / "closed")) {
    throw std::runtime_error("connection reset by peer");
  }
  std::string name = "key_" + key;
  for (char& c : name) {
    c = c == '/' ? '_' : c;
  }
  return folder_ / name;
}

void FileChannel::set(const std::string& key, const std::string& bytes) {
  const std::filesystem::path path = path_of(key);
  const std::string beside = path.string() + "." + std::to_string(::getpid());
  std::ofstream(beside, std::ios::binary) << bytes;
  std::filesystem::rename(beside, path);
}

void FileChannel::set_unless_set(
    const std::string& key,
    const std::string& bytes) {
  const std::filesystem::path path = path_of(key);
  const std::string beside = path.string() + "." + std::to_string(::getpid());
  std::ofstream(beside, std::ios::binary) << bytes;
  // Unlike a rename, a link does not replace an existing file.
  const int result = ::link(beside.c_str(), path.c_str());
  const int problem = errno;
  std::filesystem::remove(beside);
  if (result != 0 && problem != EEXIST) {
    throw std::system_error(problem, std::generic_category(), "link");
  }
}

std::optional<std::string> FileChannel::get(const std::string& key) {
  std::ifstream file(path_of(key), std::ios::binary);
  if (!file) {
    return std::nullopt;
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

RunOptions shell_options(int ranks, const std::string& script) {
  RunOptions options;
  options.program = "/bin/sh";
  options.args = {"-c", script};
  options.ranks_per_node = ranks;
  return options;
}

Endpoint fixed_endpoint(int) {
  return {.address = "127.0.0.1", .port = 29400};
}

LauncherProcess::LauncherProcess(const std::function<int()>& body) {
  start(body);
}

LauncherProcess::LauncherProcess(const RunOptions& options) {
  start([&] { return run(options, fixed_endpoint); });
}

void LauncherProcess::start(const std::function<int()>& body) {
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) {
    throw std::runtime_error("cannot make pipes");
  }
  started_ = Clock::now();
  std::fflush(nullptr); // or the child writes what this process has buffered
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    for (int fd : {out[0], out[1], err[0], err[1]}) {
      ::close(fd);
    }
    int exit_code = 255;
    try {
      exit_code = body();
    } catch (const std::exception& error) {
      ::dprintf(STDERR_FILENO, "uncaught: %s\n", error.what());
    }
    ::_exit(exit_code);
  }
  ::close(out[1]);
  ::close(err[1]);
  out_ = UniqueFd(out[0]);
  err_ = UniqueFd(err[0]);
  if (pid_ < 0) {
    throw std::runtime_error("cannot fork");
  }
}

LauncherProcess::~LauncherProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

void LauncherProcess::signal(int signal) const {
  ::kill(pid_, signal);
}

void LauncherProcess::close_stdout() {
  out_.reset();
}

LauncherResult LauncherProcess::wait() {
  LauncherResult result;
  const Clock::time_point deadline = started_ + kLauncherTimeout;
  while (out_ || err_) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd fds[2] = {
        {.fd = out_.get(), .events = POLLIN, .revents = 0},
        {.fd = err_.get(), .events = POLLIN, .revents = 0}};
    if (left.count() <= 0 ||
        ::poll(fds, 2, static_cast<int>(left.count())) <= 0) {
      ADD_FAILURE() << "the launcher is still running; its stderr so far:\n"
                    << result.err;
      return result;
    }
    if (fds[0].revents != 0 && !read_available(out_.get(), &result.out)) {
      out_.reset();
    }
    if (fds[1].revents != 0 && !read_available(err_.get(), &result.err)) {
      err_.reset();
    }
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  result.exit_code =
      WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  result.seconds =
      std::chrono::duration<double>(Clock::now() - started_).count();
  return result;
}

LauncherResult launch(const RunOptions& options) {
  return LauncherProcess(options).wait();
}

bool eventually(const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + kEventTimeout;
  while (!condition()) {
    if (Clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(kEventInterval);
  }
  return true;
}

bool is_alive(pid_t pid) {
  const std::string stat = read_text("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.size() > name_end + 2 &&
      stat[name_end + 2] != 'Z' && stat[name_end + 2] != 'X';
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) {
    text << file.rdbuf();
  }
  return text.str();
}

std::vector<pid_t> read_pids(const std::filesystem::path& path) {
  std::vector<pid_t> result;
  for (const std::string& line : split_lines(read_text(path))) {
    result.push_back(std::atoi(line.c_str()));
  }
  return result;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    result.push_back(line);
  }
  return result;
}

size_t count_lines(const std::filesystem::path& path, const std::string& line) {
  const std::vector<std::string> lines = split_lines(read_text(path));
  return static_cast<size_t>(std::count(lines.begin(), lines.end(), line));
}

} // namespace tessera::launch
