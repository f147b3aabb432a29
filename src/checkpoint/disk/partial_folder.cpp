#include "checkpoint/disk/partial_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <system_error>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/input.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kHostDigits = 12;
constexpr size_t kRandomDigits = 16;
constexpr auto kAbandonedAfter = std::chrono::hours(1);

bool is_hex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// Identifies a running system. Containers on one system share this id, as they
/// share its locks.
std::string read_host() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  std::erase(id, '-');
  // Without a boot id, nothing counts as this host's.
  return id.size() >= kHostDigits && is_hex(id) ? id.substr(0, kHostDigits)
                                                : "";
}

std::string& this_host() {
  static std::string host = read_host();
  return host;
}

std::string new_name() {
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  std::array<char, kRandomDigits + 1> digits;
  std::snprintf(
      digits.data(),
      digits.size(),
      "%016llx",
      static_cast<unsigned long long>(number));
  const std::string host =
      this_host().empty() ? std::string(kHostDigits, '0') : this_host();
  return host + "-" + digits.data();
}

/// Whether new_name() made this name on another host.
bool is_of_another_host(const std::string& name) {
  return name.size() == kHostDigits + 1 + kRandomDigits &&
      name[kHostDigits] == '-' && is_hex(name.substr(0, kHostDigits)) &&
      is_hex(name.substr(kHostDigits + 1)) &&
      name.substr(0, kHostDigits) != this_host();
}

/// The time of the newest change to a file, or to a folder and the files in it.
fs::file_time_type last_change(const fs::path& path) {
  std::error_code gone;
  auto newest = fs::last_write_time(path, gone);
  for (fs::directory_iterator it(path, gone), end; !gone && it != end;
       it.increment(gone)) {
    std::error_code ignored;
    newest = std::max(newest, fs::last_write_time(it->path(), ignored));
  }
  return newest;
}

bool may_be_under_way(const fs::path& path) {
  return is_of_another_host(path.filename().string()) &&
      last_change(path) > fs::file_time_type::clock::now() - kAbandonedAfter;
}

/// Call with the lock held.
void remove_leftovers(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!may_be_under_way(entry.path())) {
      remove_path(entry.path());
    }
  }
}

UniqueFd open_folder(const fs::path& folder) {
  return UniqueFd(
      ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
}

/// The last user of the folder removes it, possibly between our opening it and
/// our locking it.
bool is_still_called(const UniqueFd& opened, const fs::path& folder) {
  struct stat mine {};
  struct stat named {};
  return ::fstat(opened.get(), &mine) == 0 &&
      ::stat(folder.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
      mine.st_dev == named.st_dev;
}

/// Calls lock_file(); if that fails, removes the folder, which we may have
/// created.
bool lock_or_leave(const UniqueFd& opened, const fs::path& folder) {
  try {
    return lock_file(opened, folder);
  } catch (const FileError&) {
    remove_folder_if_empty(folder);
    throw;
  }
}

} // namespace

fs::path PartialFolder::of(const fs::path& target) {
  return target.parent_path() / ("." + target.filename().string() + ".partial");
}

PartialFolder::PartialFolder(const fs::path& target)
    : folder_(of(target)), path_(folder_ / new_name()) {
  constexpr int kMostAttempts = 100;
  UniqueFd opened;
  for (int i = 0; !opened || !is_still_called(opened, folder_); ++i) {
    if (i == kMostAttempts) {
      throw FileError(
          "other processes keep removing " + quoted(folder_) +
          ". Let each job save to a place of its own.");
    }
    make_folder_if_missing(folder_);
    opened = open_folder(folder_);
    if (!opened && errno != ENOENT) {
      throw FileError(
          "cannot open " + quoted(folder_) + ": " + system_reason(errno) +
          ". Remove it.");
    }
    if (opened && !lock_or_leave(opened, folder_)) {
      throw FileError(
          "another save to " + quoted(target) +
          " is under way, here or in another process. Wait for it, and let each job save to a place of its own.");
    }
  }
  lock_ = std::move(opened);
  try {
    remove_leftovers(folder_);
  } catch (...) {
    lock_.reset(); // another save will remove them
    throw;
  }
}

PartialFolder::~PartialFolder() {
  try {
    clear();
  } catch (const FileError&) {
    // The next save removes it; until then nobody reads it.
  }
}

void PartialFolder::clear() {
  if (const UniqueFd lock = std::move(lock_)) {
    remove_path(path_);
    remove_folder_if_empty(folder_);
  }
}

void PartialFolder::set_host_for_testing(const std::string& host) {
  this_host() = host.empty() ? read_host() : host;
}

void PartialFolder::remove_if_stale(const fs::path& partial) {
  const UniqueFd opened = open_folder(partial);
  if (opened && lock_file(opened, partial)) {
    remove_leftovers(partial);
    remove_folder_if_empty(partial);
  }
}

} // namespace tessera::checkpoint
