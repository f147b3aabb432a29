#include "launch/process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "launch/signals.h"

namespace tessera::launch {
namespace {

constexpr int kExitNotFound = 127;
constexpr int kExitNotStarted = 126;
constexpr rlim_t kMaxFdsToScan = 65536;

// What a child that could not be executed writes to its parent.
struct ChildError {
  int error = 0;
  bool during_exec = false;
};

// Everything the child needs, laid out before fork: between fork and exec no
// memory may be allocated, since another thread may have held the heap's lock.
struct ChildPlan {
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::vector<std::string> candidates;
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int error_fd = -1;
  int max_fd = 0;
  pid_t launcher = 0;
  sigset_t signal_mask = {};
};

std::vector<char*> c_strings(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& string : strings) {
    result.push_back(const_cast<char*>(string.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

std::string search_path(const std::vector<std::string>& environment) {
  constexpr std::string_view kName = "PATH=";
  for (const std::string& entry : environment) {
    if (entry.starts_with(kName)) {
      return entry.substr(kName.size());
    }
  }
  return "/usr/local/bin:/usr/bin:/bin";
}

// The paths to try, in order. An empty entry in PATH is the current folder.
std::vector<std::string> candidate_paths(const SpawnRequest& request) {
  const std::string& program = request.argv.front();
  if (program.find('/') != std::string::npos) {
    return {program};
  }
  std::vector<std::string> result;
  const std::string path = search_path(request.environment);
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    result.push_back((folder.empty() ? "." : folder) + "/" + program);
    begin = end + 1;
  }
  return result;
}

[[noreturn]] void fail_child(const ChildPlan& plan, ChildError error) {
  ssize_t ignored = ::write(plan.error_fd, &error, sizeof(error));
  static_cast<void>(ignored);
  ::_exit(kExitNotFound);
}

// A launcher started with these ignored would pass that on, and forwarded
// signals would have no effect. SIGHUP stays as it is, for nohup.
void reset_signal_actions() {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  for (const int signal : kRunSignals) {
    ::sigaction(signal, &action, nullptr);
  }
  ::sigaction(SIGPIPE, &action, nullptr);
}

void close_on_exec_from(int first_fd, int max_fd) {
  // Ranks must not hold the launcher's sockets: a listening one would keep
  // its port taken after the launcher closed it.
  if (::syscall(
          SYS_close_range,
          static_cast<unsigned>(first_fd),
          ~0U,
          CLOSE_RANGE_CLOEXEC) == 0) {
    return;
  }
  for (int fd = first_fd; fd < max_fd; ++fd) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
}

// As execvp: a candidate that is missing or forbidden is skipped, and
// "forbidden" is reported if nothing better is found.
int exec_candidates(const ChildPlan& plan) {
  int result = ENOENT;
  for (const std::string& path : plan.candidates) {
    ::execve(path.c_str(), plan.argv.data(), plan.environment.data());
    if (errno == EACCES) {
      result = EACCES;
    } else if (errno != ENOENT && errno != ENOTDIR) {
      return errno;
    }
  }
  return result;
}

// Runs in the child. Only async-signal-safe calls.
[[noreturn]] void become_program(const ChildPlan& plan) {
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    fail_child(plan, {.error = errno, .during_exec = false});
  }
  // The launcher may have died before the line above; its death would never
  // be signalled then.
  if (::getppid() != plan.launcher) {
    ::_exit(kExitNotStarted);
  }
  if (::dup2(plan.stdin_fd, STDIN_FILENO) < 0 ||
      ::dup2(plan.stdout_fd, STDOUT_FILENO) < 0 ||
      ::dup2(plan.stderr_fd, STDERR_FILENO) < 0) {
    fail_child(plan, {.error = errno, .during_exec = false});
  }
  close_on_exec_from(STDERR_FILENO + 1, plan.max_fd);
  reset_signal_actions();
  ::sigprocmask(SIG_SETMASK, &plan.signal_mask, nullptr);
  fail_child(plan, {.error = exec_candidates(plan), .during_exec = true});
}

// A descriptor that dup2 onto 0, 1 and 2 cannot overwrite before its turn,
// even if the launcher itself was started with some of those closed.
UniqueFd above_standard(UniqueFd fd) {
  if (!fd || fd.get() > STDERR_FILENO) {
    return fd;
  }
  return UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
}

std::string exec_hint(const std::string& program, int error) {
  const bool is_path = program.find('/') != std::string::npos;
  switch (error) {
    case ENOENT:
      if (is_path && ::access(program.c_str(), F_OK) == 0) {
        return "The file is there; the interpreter or loader it names is not.";
      }
      return is_path ? "Check the path."
                     : "It is not in PATH; for a program in the current "
                       "folder write \"./" +
              program + "\".";
    case EACCES:
      return "Is it an executable file? `chmod +x` makes it one.";
    case ENOEXEC:
      return "It is neither a program for this machine nor a script that "
             "begins with \"#!\".";
    default:
      return "Check that it runs by itself.";
  }
}

SpawnError system_failure(
    const SpawnRequest& request,
    const char* what,
    int error) {
  return SpawnError(
      "cannot start \"" + request.argv.front() + "\": " + what + ": " +
          std::strerror(error) +
          ". Check the limits on processes and open files (`ulimit -a`).",
      kExitNotStarted);
}

SpawnError child_failure(const SpawnRequest& request, ChildError failure) {
  if (!failure.during_exec) {
    return system_failure(request, "setting up the process", failure.error);
  }
  const std::string& program = request.argv.front();
  return SpawnError(
      "cannot start \"" + program + "\": " + std::strerror(failure.error) +
          ". " + exec_hint(program, failure.error),
      failure.error == ENOENT ? kExitNotFound : kExitNotStarted);
}

void kill_and_reap(pid_t pid) {
  ::kill(pid, SIGKILL);
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// Waits until the child has executed its program (which closes the pipe) or
// has said why it could not.
std::optional<ChildError> read_child_error(int fd) {
  ChildError error;
  for (;;) {
    const ssize_t num_bytes = ::read(fd, &error, sizeof(error));
    if (num_bytes < 0 && errno == EINTR) {
      continue;
    }
    if (num_bytes == static_cast<ssize_t>(sizeof(error))) {
      return error;
    }
    return std::nullopt;
  }
}

int max_fd_to_scan() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return static_cast<int>(kMaxFdsToScan);
  }
  return static_cast<int>(std::min(limit.rlim_cur, kMaxFdsToScan));
}

} // namespace

Process Process::spawn(const SpawnRequest& request) {
  int error_pipe[2];
  if (::pipe2(error_pipe, O_CLOEXEC) != 0) {
    throw system_failure(request, "pipe", errno);
  }
  UniqueFd error_read(error_pipe[0]);
  UniqueFd error_write = above_standard(UniqueFd(error_pipe[1]));
  UniqueFd null_fd =
      above_standard(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
  if (!error_write || !null_fd) {
    throw system_failure(request, "/dev/null", errno);
  }

  ChildPlan plan{
      .argv = c_strings(request.argv),
      .environment = c_strings(request.environment),
      .candidates = candidate_paths(request),
      .stdin_fd = null_fd.get(),
      .stdout_fd = request.stdout_fd,
      .stderr_fd = request.stderr_fd,
      .error_fd = error_write.get(),
      .max_fd = max_fd_to_scan(),
      .launcher = ::getpid(),
      .signal_mask = request.signal_mask,
  };
  const pid_t pid = ::fork();
  if (pid < 0) {
    throw system_failure(request, "fork", errno);
  }
  if (pid == 0) {
    become_program(plan);
  }

  // In both processes, so that the group exists whichever of them runs first.
  ::setpgid(pid, pid);
  error_write.reset();
  if (const auto failure = read_child_error(error_read.get())) {
    kill_and_reap(pid);
    throw child_failure(request, *failure);
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd) {
    const int error = errno;
    kill_and_reap(pid);
    throw system_failure(request, "pidfd_open (Linux 5.4 or later)", error);
  }
  return Process(pid, std::move(pidfd));
}

std::optional<ExitStatus> Process::poll_exit() const {
  siginfo_t info = {};
  if (::waitid(
          P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) !=
          0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  if (info.si_code == CLD_EXITED) {
    return ExitStatus{.code = info.si_status, .signal = 0};
  }
  return ExitStatus{.code = 0, .signal = info.si_status};
}

void Process::signal_group(int signal) const {
  ::kill(-pid_, signal);
}

void Process::reap() {
  ::waitpid(pid_, nullptr, WNOHANG);
  pidfd_.reset();
}

} // namespace tessera::launch
