#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/supervisor.h"

namespace tessera::launch {

/// A folder that is removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::filesystem::path operator/(const std::string& name) const {
    return path_ / name;
  }
  std::string str() const {
    return path_.string();
  }

 private:
  std::filesystem::path path_;
};

/// A channel over files in a folder, for launchers in several processes. It
/// throws once the folder holds a file "closed".
class FileChannel : public LauncherChannel {
 public:
  explicit FileChannel(std::filesystem::path folder);
  void set(const std::string& key, const std::string& bytes) override;
  void set_unless_set(const std::string& key, const std::string& bytes)
      override;
  std::optional<std::string> get(const std::string& key) override;

 private:
  std::filesystem::path path_of(const std::string& key) const;

  std::filesystem::path folder_;
};

/// Options for `ranks` ranks that run a script with /bin/sh.
RunOptions shell_options(int ranks, const std::string& script);

/// A provider that always answers 127.0.0.1:29400.
Endpoint fixed_endpoint(int attempt);

/// What a launcher left behind.
struct LauncherResult {
  int exit_code = -1;
  std::string out;
  std::string err;
  double seconds = 0;
};

/// run() in a process of its own, so that signals and descendants are those of
/// a real launcher. The destructor kills a launcher that still runs.
class LauncherProcess {
 public:
  /// Runs `body`, whose result is the exit code, with stdout and stderr in
  /// pipes.
  explicit LauncherProcess(const std::function<int()>& body);
  explicit LauncherProcess(const RunOptions& options);
  ~LauncherProcess();
  LauncherProcess(const LauncherProcess&) = delete;
  LauncherProcess& operator=(const LauncherProcess&) = delete;

  pid_t pid() const {
    return pid_;
  }
  void signal(int signal) const;
  /// Closes the reading end of the launcher's stdout.
  void close_stdout();
  /// Collects the output until the launcher ends; a test failure if that takes
  /// minutes.
  LauncherResult wait();

 private:
  void start(const std::function<int()>& body);

  pid_t pid_ = -1;
  UniqueFd out_;
  UniqueFd err_;
  std::chrono::steady_clock::time_point started_;
};

/// Starts a launcher and waits for it.
LauncherResult launch(const RunOptions& options);

/// Polls until the condition holds; false if it does not for minutes.
bool eventually(const std::function<bool()>& condition);

/// Whether a process is running (a zombie is not).
bool is_alive(pid_t pid);

std::string read_text(const std::filesystem::path& path);
/// The process ids in a file, one in each line; empty if the file does not
/// exist yet.
std::vector<pid_t> read_pids(const std::filesystem::path& path);
std::vector<std::string> split_lines(const std::string& text);
/// How many lines of a file are `line`.
size_t count_lines(const std::filesystem::path& path, const std::string& line);

} // namespace tessera::launch
