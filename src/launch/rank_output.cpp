#include "launch/rank_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace tessera::launch {
namespace {

constexpr size_t kReadBytes = 64 * 1024;
// Grandchildren that keep writing must not keep the launcher reading.
constexpr int kMaxDrainReads = 64;

const char* log_name(Stream stream) {
  switch (stream) {
    case Stream::Stdout:
      return "stdout.log";
    case Stream::Stderr:
      return "stderr.log";
  }
  return "";
}

OutputError log_error(const std::filesystem::path& path, const char* reason) {
  return OutputError(
      "cannot write the log \"" + path.string() + "\": " + reason +
      ". Check the folder's permissions and free space.");
}

} // namespace

RankOutput::RankOutput(const OutputPlan& plan, Console* console)
    : prefix_(rank_prefix(plan.rank, plan.world_size)), console_(console) {
  open(Stream::Stdout, plan);
  open(Stream::Stderr, plan);
}

void RankOutput::open(Stream stream, const OutputPlan& plan) {
  Pipe& target = pipe(stream);
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    throw OutputError(
        "cannot make a pipe for rank " + std::to_string(plan.rank) + ": " +
        std::strerror(errno) +
        ". Check the limit on open files (`ulimit -n`).");
  }
  target.read_end = UniqueFd(fds[0]);
  target.write_end = UniqueFd(fds[1]);
  ::fcntl(target.read_end.get(), F_SETFL, O_NONBLOCK);

  if (plan.log_dir) {
    std::error_code error;
    std::filesystem::create_directories(*plan.log_dir, error);
    target.log_path = *plan.log_dir / log_name(stream);
    if (error) {
      throw log_error(target.log_path, error.message().c_str());
    }
    target.log = UniqueFd(::open(
        target.log_path.c_str(),
        O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC,
        0666));
    if (!target.log) {
      throw log_error(target.log_path, std::strerror(errno));
    }
  }

  target.splitter.emplace(
      [this, stream, print = plan.print](std::string_view line) {
        if (line.starts_with(kLiveLine) && console_->live_columns() > 0) {
          line.remove_prefix(kLiveLine.size());
          console_->set_live(line.empty() ? "" : prefix_ + std::string(line));
          return;
        }
        pipe(stream).tail.push(line);
        if (print) {
          std::string text = prefix_;
          text.append(line).push_back('\n');
          console_->write(stream, text);
        }
      });
}

int RankOutput::rank_fd(Stream stream) const {
  return pipe(stream).write_end.get();
}

void RankOutput::close_rank_ends() {
  for (Pipe& target : pipes_) {
    target.write_end.reset();
  }
}

int RankOutput::read_fd(Stream stream) const {
  return pipe(stream).read_end.get();
}

void RankOutput::read_some(Stream stream) {
  read_once(stream);
}

void RankOutput::drain() {
  close_rank_ends();
  for (Stream stream : {Stream::Stdout, Stream::Stderr}) {
    for (int i = 0; i < kMaxDrainReads; ++i) {
      if (read_once(stream) == ReadResult::Nothing) {
        break;
      }
    }
    pipe(stream).splitter->finish();
    pipe(stream).read_end.reset();
  }
}

RankOutput::ReadResult RankOutput::read_once(Stream stream) {
  Pipe& source = pipe(stream);
  if (!source.read_end) {
    return ReadResult::Nothing;
  }
  char buffer[kReadBytes];
  ssize_t num_bytes = 0;
  do {
    num_bytes = ::read(source.read_end.get(), buffer, sizeof(buffer));
  } while (num_bytes < 0 && errno == EINTR);
  if (num_bytes > 0) {
    const std::string_view bytes(buffer, static_cast<size_t>(num_bytes));
    source.splitter->append(bytes);
    write_log(source, bytes);
    return ReadResult::Data;
  }
  if (num_bytes == 0 || errno != EAGAIN) {
    source.splitter->finish();
    source.read_end.reset();
  }
  return ReadResult::Nothing;
}

void RankOutput::write_log(const Pipe& source, std::string_view bytes) const {
  while (source.log && !bytes.empty()) {
    const ssize_t num_bytes =
        ::write(source.log.get(), bytes.data(), bytes.size());
    if (num_bytes >= 0) {
      bytes.remove_prefix(static_cast<size_t>(num_bytes));
    } else if (errno != EINTR) {
      throw log_error(source.log_path, std::strerror(errno));
    }
  }
}

Stream RankOutput::telling_stream() const {
  return pipe(Stream::Stderr).tail.lines().empty() ? Stream::Stdout
                                                   : Stream::Stderr;
}

std::vector<std::string> RankOutput::last_lines() const {
  return pipe(telling_stream()).tail.lines();
}

std::filesystem::path RankOutput::last_lines_log() const {
  return pipe(telling_stream()).log_path;
}

} // namespace tessera::launch
