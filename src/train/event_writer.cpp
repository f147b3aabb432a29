#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/train/event_writer.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "checkpoint/format/utf8.h"
#include "train/append_file.h"
#include "train/event_record.h"
#include "train/origin.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Creates an empty file under a name that nobody else has: processes of
/// several containers may share a folder, a host name and a process id. An
/// error is left to whoever opens the file.
fs::path new_event_file(const fs::path& folder) {
  static std::atomic<int> counter = 0;
  std::error_code ignored;
  fs::create_directories(folder, ignored);
  while (true) {
    char time[32];
    std::snprintf(
        time, sizeof(time), "%010ld", static_cast<long>(train::time_now()));
    const fs::path path = folder /
        ("events.out.tfevents." + std::string(time) + "." + train::host_name() +
         "." + std::to_string(::getpid()) + "." + std::to_string(counter++));
    constexpr mode_t kMode = 0666;
    const int fd =
        ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
    if (fd >= 0) {
      ::close(fd);
    } else if (errno == EEXIST) {
      continue;
    }
    return path;
  }
}

void check_step(const char* call, int64_t step) {
  if (step < 0) {
    raise<c10::ValueError>(
        {.call = call},
        "step " + std::to_string(step) + " is negative. Count from 0.");
  }
}

void check_tag(const std::string& tag) {
  if (tag.empty()) {
    raise<c10::ValueError>(
        {.call = "EventWriter"},
        "a tag is empty. Name the curve, as in \"train/loss\".");
  }
  if (!format::is_utf8(tag)) {
    raise<c10::ValueError>(
        {.call = "EventWriter"},
        "a tag is not UTF-8, so that TensorBoard could not read the file. Name the curve in UTF-8.");
  }
}

} // namespace

struct EventWriter::Impl {
  Impl(const fs::path& folder, const EventWriterOptions& options) {
    Group group;
    if (options.group()) {
      group = *options.group();
    } else if (is_initialized()) {
      group = world();
    }
    if (group.valid() && group.rank() != 0) {
      return;
    }
    path = new_event_file(folder);
    file.emplace(path, "EventWriter");
    const double now = train::time_now();
    write(train::version_event(now));
    if (options.purge_step()) {
      write(train::restart_event(now, *options.purge_step()));
    }
  }

  void write(const std::string& event) {
    file->append(train::framed(event));
  }

  fs::path path;
  std::optional<train::AppendFile> file; // on the rank that writes
};

EventWriter::EventWriter(
    const fs::path& folder,
    const EventWriterOptions& options) {
  if (options.purge_step()) {
    check_step("EventWriter", *options.purge_step());
  }
  impl_ = std::make_unique<Impl>(folder, options);
}

EventWriter::~EventWriter() = default;

const fs::path& EventWriter::path() const {
  return impl_->path;
}

bool EventWriter::is_writing() const {
  return impl_->file && impl_->file->is_open();
}

void EventWriter::add_scalar(std::string_view tag, double value, int64_t step) {
  add_step(step, {{std::string(tag), value}});
}

void EventWriter::add_step(
    int64_t step,
    const std::vector<EventScalar>& scalars) {
  check_step("EventWriter::add_step", step);
  for (const EventScalar& scalar : scalars) {
    check_tag(scalar.tag);
  }
  if (impl_->file && !scalars.empty()) {
    impl_->write(train::scalars_event(train::time_now(), step, scalars));
  }
}

} // namespace tessera
