#include "launch/launch_folder.h"

#include <ctime>
#include <random>
#include <system_error>

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

std::string time_name() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[64];
  std::strftime(text, sizeof(text), "launch_%Y-%m-%dT%H-%M-%SZ", &utc);
  return text;
}

} // namespace

std::string new_launch_name(const std::optional<fs::path>& log_dir) {
  const std::string base = time_name();
  std::string name = base;
  std::error_code error;
  if (log_dir) {
    fs::create_directories(*log_dir, error);
  }
  // Several may start within a second. An error is met again, and reported,
  // where the first log is opened.
  for (int number = 2; log_dir && !error &&
       !fs::create_directory(*log_dir / name, error) && !error;
       ++number) {
    name = base + "_" + std::to_string(number);
  }
  return name;
}

std::string point_latest_at(const fs::path& log_dir, const std::string& name) {
  // Renamed into place: there is no moment without the link, and other nodes
  // may do the same in the same folder.
  const fs::path fresh =
      log_dir / ("latest." + std::to_string(std::random_device()()));
  const fs::path latest = log_dir / "latest";
  std::error_code error;
  fs::remove(fresh, error);
  fs::create_directory_symlink(name, fresh, error);
  if (!error) {
    fs::rename(fresh, latest, error);
  }
  if (!error) {
    return "";
  }
  std::error_code ignored;
  fs::remove(fresh, ignored);
  return "cannot make \"" + latest.string() + "\" a link to " + name + ": " +
      error.message() + ". The logs are in that folder.";
}

} // namespace tessera::launch
